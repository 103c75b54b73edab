"""Both verification rules: boundaries, residual numerics, and exactness in distribution.

Statistical tests have fixed seeds; the false-alarm probability is stated with each.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.acceptance import Acceptance, accept_by_rejection, accept_exact, draw, residual
from policies.sampling import filtered_probs
from policies.types import SamplingParams

VOCAB = 151_936
SAMPLES = 20_000
BELOW_ONE = 1.0 - 2.0**-53  # the greatest double below 1
EXTREMES = [0.0, 5e-324, 2.0**-53, 0.5, 1.0 - 2.0**-24, BELOW_ONE]


def one(
    draft_id: int, draft: list[float], target: list[float], accept: float, after: float = 0.5
) -> Acceptance:
    """The rule for one draft token, with no bonus token wanted."""
    return accept_by_rejection([draft_id], np.array([draft]), np.array([target]), [accept], [after])


def assert_frequencies(counts: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square, false alarm 1e-6 (Wilson-Hilferty); what has no probability never occurs."""
    assert counts[probs == 0].sum() == 0
    expected = counts.sum() * probs[probs > 0]
    assert expected.min() >= 5, "too few samples for a chi-square"
    statistic = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    dof = max(1, expected.size - 1)
    assert statistic < dof * (1 - 2 / (9 * dof) + 4.7534 * math.sqrt(2 / (9 * dof))) ** 3


# --- exact match -----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_exact_match_commits_exactly_what_the_target_writes(
    drafts: list[int], target: list[int]
) -> None:
    """Losslessness of the coupled rule, whatever the drafts; and it stops only at a mismatch."""
    target = target[: len(drafts) + 1]
    verdict = accept_exact(drafts, target)
    committed = [*drafts[: verdict.accepted], verdict.next_id]
    assert committed == target[: len(committed)]
    assert verdict.recovered == (verdict.accepted < len(drafts))
    assert not verdict.recovered or drafts[verdict.accepted] != verdict.next_id


def test_exact_match_names_recovered_and_bonus_tokens() -> None:
    assert accept_exact([4, 5, 6], [4, 9, 6, 7]) == Acceptance(1, 9, recovered=True)
    assert accept_exact([4, 5, 6], [4, 5, 6, 7]) == Acceptance(3, 7, recovered=False)
    assert accept_exact([], [7]) == Acceptance(0, 7, recovered=False)


@pytest.mark.parametrize("target", [[], [1, 2], [1, 2, 3, 4]])
def test_exact_match_needs_one_target_id_more_than_drafts(target: list[int]) -> None:
    with pytest.raises(ValueError, match="2 drafts need one target id more"):
        accept_exact([1, 2], target)


# --- boundaries of the accept test -----------------------------------------------------------


@pytest.mark.parametrize("accept", EXTREMES)
def test_a_draft_without_target_probability_always_falls(accept: float) -> None:
    """C05: top-k has removed the draft from the target; the draw is exactly 0 among others."""
    verdict = one(0, [0.9, 0.1, 0.0], [0.0, 0.4, 0.6], accept)
    assert verdict.accepted == 0
    assert verdict.recovered
    assert not verdict.inconsistent
    assert verdict.next_id in (1, 2)


@pytest.mark.parametrize("accept", EXTREMES)
@pytest.mark.parametrize(
    ("draft", "target"), [(0.3, 0.3), (0.3, 0.3000001), (1e-8, 1e-8), (5e-324, 5e-324), (1.0, 1.0)]
)
def test_a_draft_the_target_likes_as_much_always_stands(
    accept: float, draft: float, target: float
) -> None:
    """C05: target / draft ≥ 1 and a draw just below 1; denormals too."""
    verdict = one(0, [draft, 1 - draft], [target, 1 - target], accept)
    assert verdict == Acceptance(1, None, recovered=False)


@pytest.mark.parametrize("accept", EXTREMES)
@pytest.mark.parametrize("after", EXTREMES)
def test_a_draft_its_own_distribution_excludes_is_reported_and_replaced(
    accept: float, after: float
) -> None:
    """C05: draft probability 0 for a proposed id (stale): the target's distribution is drawn."""
    with np.errstate(all="raise"):
        verdict = one(1, [1.0, 0.0, 0.0], [0.25, 0.25, 0.5], accept, after)
    assert verdict.inconsistent
    assert verdict.recovered
    assert verdict.accepted == 0
    assert verdict.next_id == (0 if after < 0.25 else 1 if after < 0.5 else 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("where", [0, 1])
def test_a_corrupt_draft_distribution_is_reported_and_replaced(bad: float, where: int) -> None:
    """C04: one NaN in the draft's distribution, at the proposed id or elsewhere."""
    draft = [0.5, 0.5, 0.0]
    draft[where] = bad
    for after, expected in ((0.0, 1), (0.39, 1), (0.41, 2), (BELOW_ONE, 2)):
        verdict = one(0, draft, [0.0, 0.4, 0.6], 0.5, after)
        assert verdict == Acceptance(0, expected, recovered=True, inconsistent=True)


def test_a_corrupt_row_behind_the_first_rejection_is_not_looked_at() -> None:
    draft = np.array([[1.0, 0.0], [math.nan, 1.0]])
    target = np.array([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    verdict = accept_by_rejection([0, 0], draft, target, [0.5, 0.5], [0.5, 0.5, 0.5])
    assert verdict == Acceptance(0, 1, recovered=True)


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 0.0], [-0.5, 1.5], [0.0, 0.0]])
@pytest.mark.parametrize("row", [0, 1])
def test_a_corrupt_target_distribution_is_refused(bad: list[float], row: int) -> None:
    """C04: nothing can be drawn from it, so nothing is made up."""
    target = np.array([[0.5, 0.5], [0.5, 0.5]])
    target[row] = bad
    with pytest.raises(ValueError, match="every row of target_probs"):
        accept_by_rejection([0], np.array([[0.5, 0.5]]), target, [0.5], [0.5, 0.5])


@pytest.mark.parametrize(
    "change", ["id", "negative id", "draft", "target", "accept", "next", "one"]
)
def test_arguments_that_do_not_belong_together_are_refused(change: str) -> None:
    """A negative id would otherwise count from the end of the vocabulary."""
    ids, draft, target = [0], np.full((1, 2), 0.5), np.full((2, 2), 0.5)
    accept, after = [0.5], [0.5, 0.5]
    match change:
        case "id":
            ids = [2]
        case "negative id":
            ids = [-1]
        case "draft":
            draft = np.full((1, 3), 1 / 3)
        case "target":
            target = np.full((3, 2), 0.5)
        case "accept":
            accept = []
        case "next":
            after = [0.5]
        case "one":
            after = [0.5, 1.0]
    with pytest.raises(ValueError, match=r"draft|drafts|draws|draw"):
        accept_by_rejection(ids, draft, target, accept, after)


def test_after_the_last_accepted_draft_comes_a_bonus_only_if_its_row_is_given() -> None:
    draft, target = np.full((1, 2), 0.5), np.array([[0.5, 0.5], [0.0, 1.0]])
    with_bonus = accept_by_rejection([0], draft, target, [0.9], [0.0, 0.0])
    assert with_bonus == Acceptance(1, 1, recovered=False)
    without = accept_by_rejection([0], draft, target[:1], [0.9], [0.0])
    assert without == Acceptance(1, None, recovered=False)
    no_drafts = accept_by_rejection([], np.zeros((0, 2)), target[1:], [], [0.0])
    assert no_drafts == Acceptance(0, 1, recovered=False)


# --- residual and inverse CDF ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_equal_distributions_accept_everything_and_recover_from_the_target(dtype: type) -> None:
    """C04: bit-equal in fp16 and fp32. A forced rejection finds no residual: the target's own."""
    weights = np.random.default_rng(1).random(50)
    probs = (weights / weights.sum()).astype(dtype)
    rows = np.stack([probs])
    for token_id in range(50):
        for accept in EXTREMES:
            verdict = accept_by_rejection([token_id], rows, rows, [accept], [0.5])
            assert verdict == Acceptance(1, None, recovered=False)
    exact = probs.astype(np.float64)
    assert np.array_equal(residual(exact, exact), exact)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_target_one_ulp_below_everywhere_recovers_from_the_target(dtype: type) -> None:
    """C04: a rejection by rounding alone, with no positive residual."""
    draft = np.array([0.5, 0.25, 0.25, 0.0], dtype)
    target = np.nextafter(draft, dtype(0))
    recovered = []
    with np.errstate(all="raise"):
        for after in np.linspace(0, 0.999, 100):
            verdict = accept_by_rejection([0], draft[None], target[None], [BELOW_ONE], [after])
            assert verdict.recovered
            assert not verdict.inconsistent
            recovered.append(verdict.next_id)
    assert np.bincount(recovered, minlength=4).tolist() == pytest.approx([50, 25, 25, 0], abs=1)


@pytest.mark.parametrize("excess", [math.nan, 0.0, 5e-324, 1e-310])
def test_a_residual_that_vanishes_is_replaced_by_the_target(excess: float) -> None:
    """C04: sum 0, NaN or denormal."""
    target = np.array([0.5, 0.5, excess])
    draft = np.array([0.5, 0.5, 0.0])
    assert residual(target, draft) is target


def test_the_residual_is_normalised_linearly() -> None:
    """C04: 0.3 to 0.1 over ids 1 and 2, not a softmax over the vocabulary."""
    after = np.linspace(0, 0.9999, 1000)
    ids = [one(0, [0.7, 0.2, 0.1], [0.3, 0.5, 0.2], 0.99, uniform).next_id for uniform in after]
    assert np.bincount(ids).tolist() == pytest.approx([0, 750, 250], abs=1)


def test_tails_of_1e_8_over_a_real_vocabulary_are_recovered_from_evenly() -> None:
    """C04: the residual lies in 151,935 tail ids of 1e-8 each, in float32."""
    target = np.full((1, VOCAB), 1e-8, np.float32)
    target[0, 7] = 1 - 1e-8 * (VOCAB - 1)
    draft = np.zeros((1, VOCAB), np.float32)
    draft[0, 7] = 1.0
    for after in (*EXTREMES, 0.1, 0.9):
        verdict = accept_by_rejection([7], draft, target, [BELOW_ONE], [after])
        assert verdict.recovered
        assert not verdict.inconsistent
        assert verdict.next_id is not None
        assert verdict.next_id != 7
        assert abs(verdict.next_id - after * (VOCAB - 1)) < 2


@given(
    st.lists(st.sampled_from([0.0, 0.0, 5e-324, 1e-300, 1e-8, 0.1, 1.0, 3.0]), min_size=1).filter(
        any
    ),
    st.one_of(st.sampled_from(EXTREMES), st.floats(0, BELOW_ONE)),
)
@example([5e-324, 0.0], BELOW_ONE)
def test_a_draw_never_picks_an_id_without_weight(weights: list[float], uniform: float) -> None:
    """C04, C05: at a draw of 0, and just below 1."""
    assert weights[draw(np.array(weights), uniform)] > 0


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=20), st.floats(0, BELOW_ONE))
def test_a_draw_inverts_the_cumulative_weights(weights: list[float], uniform: float) -> None:
    token_id = draw(np.array(weights), uniform)
    total = math.fsum(weights)
    assert math.fsum(weights[:token_id]) <= uniform * total + 1e-9
    assert math.fsum(weights[: token_id + 1]) >= uniform * total - 1e-9


# --- exactness in distribution ---------------------------------------------------------------


def run_rule(
    draft: np.ndarray, target: np.ndarray, samples: int = SAMPLES
) -> tuple[list[list[int]], int]:
    """What the rule commits over many rounds, and how many first drafts stood."""
    rng = np.random.default_rng(12)
    count, vocab = draft.shape
    drafted = np.stack([rng.choice(vocab, samples, p=row) for row in draft], axis=1).tolist()
    accept = rng.random((samples, count)).tolist()
    after = rng.random((samples, len(target))).tolist()
    committed, stood = [], 0
    for ids, accept_draws, next_draws in zip(drafted, accept, after, strict=True):
        verdict = accept_by_rejection(ids, draft, target, accept_draws, next_draws)
        assert not verdict.inconsistent
        assert verdict.next_id is not None
        committed.append([*ids[: verdict.accepted], verdict.next_id])
        stood += verdict.accepted > 0
    return committed, stood


def test_rejection_is_exact_in_distribution_at_every_position() -> None:
    """20,000 rounds of two drafts and a bonus, chi-square, false alarm 1e-6 per position.

    The share of first drafts that stand is Σ min(target, draft), within 5 deviations (6e-7).
    """
    rng = np.random.default_rng(4)
    draft, target = rng.dirichlet(np.ones(6), 2), rng.dirichlet(np.ones(6), 3)
    committed, stood = run_rule(draft, target)
    for position in range(3):
        ids = [tokens[position] for tokens in committed if len(tokens) > position]
        assert_frequencies(np.bincount(ids, minlength=6), target[position])
    overlap = float(np.minimum(draft[0], target[0]).sum())
    assert abs(stood / SAMPLES - overlap) < 5 * math.sqrt(overlap * (1 - overlap) / SAMPLES)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=0.7, top_k=3, top_p=0.8),
        SamplingParams(temperature=0.8, top_k=1),
    ],
)
def test_rejection_with_filters_writes_the_filtered_target(sampling: SamplingParams) -> None:
    """C03: the drafter's favourite, id 6, lies outside the target's nucleus; false alarm 1e-6."""
    target_logits = np.array([2.0, 1.6, 1.0, 0.4, 0.0, -0.5, -1.5, -2.0], np.float32)
    draft_logits = np.array([1.5, 1.4, 1.2, 0.0, 0.2, -0.5, 2.5, -2.0], np.float32)
    target = filtered_probs(target_logits, sampling)[None]
    draft = filtered_probs(draft_logits, sampling)[None]
    committed, _ = run_rule(draft, np.concatenate((target, target)))
    first = np.bincount([tokens[0] for tokens in committed], minlength=8)
    assert_frequencies(first, target[0])


def test_a_perfect_drafter_is_always_right() -> None:
    """C04: temperature 1, 2,000 tokens, distributions rounded to float32 as on the wire."""
    rng = np.random.default_rng(13)
    for _ in range(500):
        logits = rng.normal(0, 3, (4, 300)).astype(np.float32)
        rows = [filtered_probs(row, SamplingParams(1.0)).astype(np.float32) for row in logits]
        probs = np.stack(rows)
        drafts = [draw(row.astype(np.float64), rng.random()) for row in probs]
        verdict = accept_by_rejection(drafts, probs, probs, rng.random(4), rng.random(4))
        assert verdict == Acceptance(4, None, recovered=False)
