"""Penalties, bias and ids ruled out, against a brute force in plain floats and dicts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.penalties import adjusted
from policies.sampling import NonFiniteLogits, choose, pick, signal
from policies.types import SamplingParams

VOCAB = 8
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -math.inf], np.float32)
EVERYTHING = SamplingParams(
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.3,
    logit_bias=((1, 2.0), (7, 100.0)),
    min_tokens=3,
    stop_ids=frozenset({0}),
    prompt_len=2,
)


def brute_force(
    logits: Sequence[float], s: SamplingParams, held: Sequence[int], position: int
) -> dict[int, float]:
    """The adjusted logit of every id, term by term from the definitions."""
    before = list(held)[:position]
    generated = before[s.prompt_len :]
    scores = {}
    for token_id, logit in enumerate(logits):
        if token_id in before:
            logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
        if token_id in generated:
            logit -= s.presence_penalty
        for _ in range(generated.count(token_id)):
            logit -= s.frequency_penalty
        for biased_id, bias in s.logit_bias:
            logit += bias if biased_id == token_id else 0.0
        if token_id in s.stop_ids and len(generated) < s.min_tokens:
            logit = -math.inf
        scores[token_id] = logit
    return scores


def logit_rows() -> st.SearchStrategy[np.ndarray]:
    value = st.floats(-30, 30, width=32) | st.just(-math.inf) | st.just(0.0)
    row = st.lists(value, min_size=VOCAB, max_size=VOCAB)
    return row.map(lambda values: np.array(values, np.float32))


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    off_or = st.sampled_from([0.0, 0.0, 1.0])
    pair = st.tuples(st.integers(0, VOCAB + 4), st.floats(-100, 100))
    return SamplingParams(
        presence_penalty=draw(off_or) * draw(st.floats(-2, 2)),
        frequency_penalty=draw(off_or) * draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.1, 2)),
        logit_bias=tuple(draw(st.lists(pair, max_size=4))),
        min_tokens=draw(st.integers(0, 6)),
        stop_ids=frozenset(draw(st.sets(st.integers(0, VOCAB + 4), max_size=3))),
        prompt_len=draw(st.integers(1, 5)),
    )


@settings(max_examples=500, deadline=None)
@given(
    row=logit_rows(),
    sampling=parameters(),
    generated=st.lists(st.integers(0, VOCAB + 4), max_size=10),
    later=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
def test_adjusted_logits_are_the_brute_forces(
    row: np.ndarray, sampling: SamplingParams, generated: list[int], later: list[int]
) -> None:
    """C25. Ids past the row occur in prompt, text, bias and stop ids; `later` is not seen."""
    prompt = [5 - i for i in range(sampling.prompt_len)]
    held = [*prompt, *generated, *later]
    position = len(prompt) + len(generated)
    before = row.copy()
    expected = brute_force(row.tolist(), sampling, held, position)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = adjusted(row, sampling, held, position)
    assert got.dtype == np.float32
    assert got.tolist() == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-4)
    np.testing.assert_array_equal(row, before)


def test_neutral_parameters_give_the_row_itself() -> None:
    sampling = SamplingParams(0.7, 3, 0.9, 5, stop_ids=frozenset({0}), prompt_len=1)
    assert adjusted(LOGITS, sampling, [0, 1, 1, 2], 4) is LOGITS


def test_presence_counts_an_id_once_and_frequency_each_time() -> None:
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, prompt_len=1)
    got = adjusted(LOGITS, sampling, [1, 0, 2, 0, 0], 5)
    assert got[0] == 2.0 - 0.5 - 3 * 0.25
    assert got[2] == 0.5 - 0.5 - 0.25
    assert got[1] == 1.0  # only in the prompt


def test_repetition_counts_the_prompt_divides_above_zero_and_multiplies_below() -> None:
    """Keskar et al. 2019, §4.1, in the form that lowers an id of either sign."""
    sampling = SamplingParams(repetition_penalty=2.0, prompt_len=2)
    got = adjusted(LOGITS, sampling, [0, 5, 5, 3], 4)
    assert got.tolist() == [1.0, 1.0, 0.5, 0.0, -0.5, -2.0, -2.0, -math.inf]


def test_repetition_comes_before_presence_and_frequency_and_these_before_bias() -> None:
    sampling = replace(EVERYTHING, repetition_penalty=2.0, min_tokens=0)
    got = adjusted(LOGITS, sampling, [3, 3, 1, 1], 4)
    assert got[1] == 1.0 / 2.0 - 0.5 - 2 * 0.25 + 2.0


def test_two_biases_of_one_id_add() -> None:
    sampling = SamplingParams(logit_bias=((2, 1.0), (2, 0.5)))
    assert adjusted(LOGITS, sampling, [0], 1)[2] == 2.0


def test_drafts_before_the_position_count_as_committed_and_later_ones_not_at_all() -> None:
    """One forward over a window is judged position by position, each with its own counts."""
    window = [4, 5, 0, 0, 1, 0]
    for position in range(2, len(window) + 1):
        alone = adjusted(LOGITS, EVERYTHING, window[:position], position)
        np.testing.assert_array_equal(adjusted(LOGITS, EVERYTHING, window, position), alone)


@pytest.mark.parametrize("generated", range(6))
def test_no_stop_id_is_picked_before_min_tokens_and_any_after(generated: int) -> None:
    sampling = SamplingParams(
        min_tokens=3, stop_ids=frozenset({0, 1}), logit_bias=((0, 100.0),), prompt_len=2
    )
    held = [0, 1, *[2] * generated]  # stop ids in the prompt end nothing
    token_id = pick(LOGITS, sampling, held, len(held)).id
    assert token_id == (2 if generated < 3 else 0)


@pytest.mark.parametrize("bias", [100.0, 1e4])
def test_no_bias_revives_a_masked_id(bias: float) -> None:
    sampling = SamplingParams(0.8, logit_bias=((7, bias),))
    assert {pick(LOGITS, replace(sampling, seed=i), [0], 1).id for i in range(200)}.isdisjoint({7})


def test_a_ban_never_lets_the_id_through_at_any_temperature_up_to_two() -> None:
    """The noise spans 26.1 (GUMBEL_MAX - GUMBEL_MIN); 2 · 26.1 plus the lead of 4 is below 100."""
    sampling = SamplingParams(2.0, logit_bias=((0, -100.0),))
    assert all(pick(LOGITS, replace(sampling, seed=i), [1], 1).id for i in range(500))


def test_filters_see_the_adjusted_logits() -> None:
    """With top_k 1 the only id kept is the best one after bias, not before."""
    sampling = SamplingParams(5.0, top_k=1, logit_bias=((6, 10.0),))
    assert {pick(LOGITS, replace(sampling, seed=i), [0], 1).id for i in range(50)} == {6}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_nan_or_infinite_logit_is_refused_even_where_it_would_be_ruled_out(
    bad: float, at: int
) -> None:
    """C36: no penalty, ban or min_tokens may hide that the logits mean nothing."""
    row = LOGITS.copy()
    row[at] = bad
    sampling = replace(EVERYTHING, logit_bias=((at, -100.0),), stop_ids=frozenset({at}))
    for params in (sampling, SamplingParams(), SamplingParams(logprobs=2)):
        with pytest.raises(NonFiniteLogits):
            pick(row, params, [0, 1, at], 3)


def test_a_row_of_which_only_stop_ids_are_left_before_min_tokens_is_refused() -> None:
    row = np.full(VOCAB, -np.inf, np.float32)
    row[2] = 1.0
    sampling = SamplingParams(min_tokens=1, stop_ids=frozenset({2}), prompt_len=1)
    with pytest.raises(NonFiniteLogits):
        pick(row, sampling, [0], 1)
    assert pick(row, sampling, [0, 0], 2).id == 2


@settings(max_examples=100, deadline=None)
@given(row=logit_rows(), sampling=parameters(), seed=st.integers(0, 2**64 - 1))
def test_pick_chooses_from_the_adjusted_row_and_is_confident_by_the_models_own(
    row: np.ndarray, sampling: SamplingParams, seed: int
) -> None:
    row[6] = 1.0  # something is left whatever is masked
    sampling = replace(sampling, temperature=0.8, seed=seed, stop_ids=sampling.stop_ids - {6})
    held = [1, 1, 2, 3, 2, 2]
    choice = pick(row, sampling, held, len(held))
    scores = brute_force(row.tolist(), sampling, held, len(held))
    assert choice.id == choose(np.array(list(scores.values()), np.float32), sampling, len(held))
    assert (choice.confidence, choice.entropy) == signal(row, choice.id)
    assert choice.logprobs is None


def test_a_negative_stop_id_is_refused_and_does_not_rule_out_an_id_from_the_rows_end() -> None:
    """-1 must not mask the last id by indexing from the end, nor may -99 raise IndexError."""
    with pytest.raises(ValueError, match="stop_ids"):
        SamplingParams(stop_ids=frozenset({-1}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", -1e39),
        ("frequency_penalty", -1e39),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
        ("logit_bias", ((1, 1e39),)),
    ],
)
def test_a_finite_parameter_is_refused_or_overflows_no_logit(name: str, value: object) -> None:
    """The inf or NaN of an overflow would end the request and blame the model's logits."""
    try:
        sampling = SamplingParams(**{name: value})  # type: ignore[arg-type]
    except ValueError as error:
        assert name in str(error)  # noqa: PT017
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = adjusted(LOGITS, sampling, [3, 3, 0], 3)
    assert not np.isnan(row).any()
    assert row.max() < math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("prompt_len", -1),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
