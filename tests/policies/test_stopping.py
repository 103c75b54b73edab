"""Closed forms of the draft length against brute force, simulation and the paper's tables.

Where two rules must agree on the very same k, times are whole milliseconds and probabilities
multiples of 1/64, so that every product and sum is exact and ties are ties.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.costs import Costs
from policies.stopping import (
    calibrated_draft_len,
    calibrated_round_ms,
    cost_ms_per_token,
    critical_one_way_ms,
    draft_len_envelope,
    empirical_prefix,
    expected_committed,
    geometric_critical_one_way_ms,
    geometric_prefix,
    greedy_draft_len,
    heavy_tailed_prefix,
    marginal_draft_len,
    modelled_round_ms,
    optimal_draft_len,
    theory_draft_len,
)

# Table I (averages) and the acceptance rate of the tail from Table II; d_c by Eq. 24.
QWEN = (Costs(draft_ms=85.14, verify_ms=0.0, verify_ms_per_token=8.09), 0.828)
LLAMA = (Costs(draft_ms=67.37, verify_ms=0.0, verify_ms_per_token=8.37), 0.845)
# Table I, per-token costs at k = 1, 5, 10.
TABLE_I = {
    "Qwen": ([106.25, 79.46, 73.70], [16.56, 5.50, 3.06]),
    "LLaMA": ([90.40, 58.94, 52.59], [17.18, 5.78, 3.12]),
}
# Table II, LLaMA's prefix curve at k = 1, 3, 5, 7, 10.
TABLE_II_LLAMA = [0.382, 0.226, 0.170, 0.124, 0.082]
# Table III, the delays tried, in ms one way.
TABLE_III_DELAYS = [0, 5, 20, 40, 55, 83, 111, 150]

whole_ms = st.integers(0, 400)
rates = st.floats(0.01, 0.99)


@st.composite
def curves(draw: st.DrawFn, convex: bool) -> tuple[np.ndarray, np.ndarray]:
    """Any `round_ms` and `prefix` of one length, in exact binary fractions."""
    max_draft_len = draw(st.integers(1, 12))
    steps = draw(st.lists(whole_ms, min_size=max_draft_len, max_size=max_draft_len))
    chances = draw(st.lists(st.integers(0, 64), min_size=max_draft_len, max_size=max_draft_len))
    round_ms = np.cumsum(steps[:1] + sorted(steps[1:])) if convex else np.array(steps)
    return round_ms.astype(float), np.array(sorted(chances, reverse=True)) / 64


@st.composite
def linear_costs(draw: st.DrawFn) -> Costs:
    return Costs(draw(st.floats(1, 200)), draw(st.floats(0, 200)), draw(st.floats(0, 50)))


def least_by_brute_force(round_ms: np.ndarray, prefix: np.ndarray, one_way_ms: int) -> int:
    """The first k of the lowest (round + 2d) / B in exact fractions, straight from §III-C."""
    costs = []
    for k in range(1, len(prefix) + 1):
        committed = 1 + sum(Fraction(float(p)) for p in prefix[:k])
        costs.append((Fraction(float(round_ms[k - 1])) + 2 * one_way_ms) / committed)
    return costs.index(min(costs)) + 1


def committed_by_simulation(
    prefix: np.ndarray, draft_len: int, rounds: int, rng: np.random.Generator
) -> np.ndarray:
    """Committed tokens of `rounds` rounds, each draft judged after the ones before it stood."""
    tokens, standing = np.ones(rounds), np.ones(rounds, bool)
    before = 1.0
    for chance in prefix[:draft_len]:
        standing &= rng.random(rounds) < chance / before
        tokens += standing
        before = chance
    return tokens


@settings(deadline=None)
@given(rates, st.integers(1, 40))
def test_expected_tokens_have_the_closed_form_under_a_constant_acceptance_rate(
    rate: float, max_draft_len: int
) -> None:
    drafts = np.arange(1, max_draft_len + 1)
    closed = (1 - rate ** (drafts + 1)) / (1 - rate)
    assert expected_committed(geometric_prefix(rate, max_draft_len)) == pytest.approx(closed)


def test_certain_and_hopeless_drafts_commit_k_plus_one_tokens_and_one() -> None:
    assert expected_committed(geometric_prefix(1.0, 3)).tolist() == [2, 3, 4]
    assert expected_committed(geometric_prefix(0.0, 3)).tolist() == [1, 1, 1]


def test_the_empirical_curve_is_that_of_the_rounds_whatever_their_lengths() -> None:
    """Each point within 5 standard errors: false-alarm probability under 3e-6 for all five."""
    rng = np.random.default_rng(1)
    prefix, rounds = np.array([0.7, 0.6, 0.35, 0.3, 0.1]), 40_000
    accepted_at, judged_at = np.zeros(5, int), np.zeros(5, int)
    for draft_len in (1, 2, 5):
        stood = committed_by_simulation(prefix, draft_len, rounds, rng) - 1
        for position in range(draft_len):
            judged_at[position] += np.count_nonzero(stood >= position)
            accepted_at[position] += np.count_nonzero(stood > position)
    measured = empirical_prefix(accepted_at.tolist(), judged_at.tolist())
    assert np.abs(measured - prefix).max() < 5 * math.sqrt(0.25 / rounds)


def test_the_empirical_curve_ends_where_nothing_was_judged() -> None:
    assert empirical_prefix([3, 1, 0, 0], [4, 2, 0, 0]).tolist() == [0.75, 0.375]
    weighted = empirical_prefix([0.75, 0.125, 0.0, 0.0], [1.0, 0.25, 0.0, 0.0])
    assert weighted.tolist() == [0.75, 0.375]


@settings(deadline=None)
@given(curves(convex=False), whole_ms)
def test_the_optimum_is_the_first_of_the_lowest_costs(curve, one_way_ms: int) -> None:
    assert optimal_draft_len(*curve, one_way_ms) == least_by_brute_force(*curve, one_way_ms)


@settings(deadline=None)
@given(curves(convex=True), whole_ms)
def test_the_marginal_rule_finds_the_optimum_of_convex_round_times(curve, one_way_ms: int) -> None:
    """Lemma 1 and Corollary 1."""
    assert marginal_draft_len(*curve, one_way_ms) == optimal_draft_len(*curve, one_way_ms)


def test_the_marginal_rule_can_stop_short_where_round_times_are_not_convex() -> None:
    round_ms, prefix = np.array([10.0, 30.0, 31.0]), np.array([0.5, 0.5, 0.5])
    assert marginal_draft_len(round_ms, prefix, 15.0) == 1
    assert optimal_draft_len(round_ms, prefix, 15.0) == 3


@settings(deadline=None)
@given(linear_costs(), rates, st.floats(0, 5000))
def test_a_modelled_cost_curve_falls_and_then_rises(
    costs: Costs, rate: float, one_way_ms: float
) -> None:
    """Lemma 1, discrete quasi-convexity; 1e-12 allows for rounding."""
    cost = cost_ms_per_token(modelled_round_ms(costs, 40), geometric_prefix(rate, 40), one_way_ms)
    ratios = cost[1:] / cost[:-1]
    turn = int(np.argmin(cost))
    assert (ratios[:turn] <= 1 + 1e-12).all()
    assert (ratios[turn:] >= 1 - 1e-12).all()


@settings(deadline=None)
@given(curves(convex=False), whole_ms, whole_ms)
def test_a_longer_delay_never_shortens_the_optimum(curve, one_way_ms: int, more_ms: int) -> None:
    """Theorem 2, for any curves."""
    short = optimal_draft_len(*curve, one_way_ms)
    assert optimal_draft_len(*curve, one_way_ms + more_ms) >= short


@settings(deadline=None)
@given(linear_costs(), st.floats(0.01, 0.95), st.floats(0, 5000))
def test_the_optimum_is_finite_and_within_the_logarithmic_envelope(
    costs: Costs, rate: float, one_way_ms: float
) -> None:
    """Theorems 1 and 4: no draft length beyond the envelope is optimal, however many there are."""
    low, high = draft_len_envelope(costs, rate, one_way_ms)
    for max_draft_len in (high, high + 1, 4 * high):
        prefix = geometric_prefix(rate, max_draft_len)
        best = optimal_draft_len(modelled_round_ms(costs, max_draft_len), prefix, one_way_ms)
        assert low <= best <= high


@settings(deadline=None)
@given(linear_costs(), st.floats(0.05, 0.9))
def test_the_envelope_closes_on_the_optimum_as_the_delay_grows(costs: Costs, rate: float) -> None:
    """Two lengths at most are left, and each e-fold of the delay adds 1 / ln(1/α) of them."""
    low, high = draft_len_envelope(costs, rate, 1e9)
    assert high - low <= 1
    later, _ = draft_len_envelope(costs, rate, 1e9 * math.e**2)
    assert later - low == pytest.approx(2 / -math.log(rate), abs=1 + 1e-3)


@pytest.mark.parametrize(
    ("tail_exponent", "growth"), [(0.5, 16.0), (2.0, 4.0), (3.0, 16 ** (1 / 3))]
)
def test_a_heavy_tail_makes_the_optimum_outgrow_the_logarithm(
    tail_exponent: float, growth: float
) -> None:
    """16 times the delay multiplies k* by 16^min(1, 1/β), where geometric decay adds a constant."""
    costs, max_draft_len = Costs(10.0, 10.0), 40_000
    round_ms = modelled_round_ms(costs, max_draft_len)
    heavy = heavy_tailed_prefix(tail_exponent, max_draft_len)
    lens = [optimal_draft_len(round_ms, heavy, one_way_ms) for one_way_ms in (1e4, 16e4)]
    assert lens[1] / lens[0] == pytest.approx(growth, rel=0.15)
    geometric = geometric_prefix(float(heavy[0]), max_draft_len)
    assert lens[0] > 2 * optimal_draft_len(round_ms, geometric, 1e4)


@pytest.mark.parametrize("scale", ["constant", "exponential", "bimodal"])
def test_only_the_mean_of_a_delay_matters(scale: str) -> None:
    """Theorem 3. Each |z| < 5: false-alarm probability under 2e-6 for the three."""
    rng = np.random.default_rng(2)
    mean_ms, rounds, draft_len = 80.0, 200_000, 4
    one_way_ms = {
        "constant": np.full(rounds, mean_ms),
        "exponential": rng.exponential(mean_ms, rounds),
        "bimodal": np.where(rng.random(rounds) < 0.1, 10 * mean_ms, 0.0),
    }[scale]
    round_ms, prefix = modelled_round_ms(Costs(36.0, 30.0), 8), geometric_prefix(0.8, 8)
    cost = cost_ms_per_token(round_ms, prefix, mean_ms)[draft_len - 1]
    tokens = committed_by_simulation(prefix, draft_len, rounds, rng)
    # the mean of ms - cost · tokens is zero if cost is the ratio of the means
    excess = round_ms[draft_len - 1] + 2 * one_way_ms - cost * tokens
    assert abs(excess.mean() / (excess.std() / math.sqrt(rounds))) < 5


@settings(deadline=None)
@given(curves(convex=False))
def test_the_critical_delay_parts_one_draft_from_more(curve) -> None:
    """Theorem 4, for any curves, at delays just above and just below it."""
    critical_ms = critical_one_way_ms(*curve)
    assert critical_ms >= 0
    if critical_ms == math.inf:
        assert optimal_draft_len(*curve, 1e9) == 1
        return
    assert optimal_draft_len(*curve, critical_ms * (1 + 1e-9) + 1e-6) > 1
    if critical_ms > 0:
        assert optimal_draft_len(*curve, max(0.0, critical_ms * (1 - 1e-9) - 1e-6)) == 1


@settings(deadline=None)
@given(curves(convex=True))
def test_with_convex_round_times_two_drafts_are_the_first_to_beat_one(curve) -> None:
    round_ms, prefix = curve
    assert critical_one_way_ms(round_ms[:2], prefix[:2]) == critical_one_way_ms(round_ms, prefix)


@settings(deadline=None)
@given(linear_costs(), rates)
def test_the_closed_form_of_the_critical_delay_is_where_one_and_two_drafts_cost_the_same(
    costs: Costs, rate: float
) -> None:
    """Eq. 24. 1e-6 ms is for rounding near zero."""
    general_ms = critical_one_way_ms(modelled_round_ms(costs, 20), geometric_prefix(rate, 20))
    closed_ms = geometric_critical_one_way_ms(costs, rate)
    assert closed_ms == pytest.approx(general_ms, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("suite", "critical_ms"), [(QWEN, 73.6), (LLAMA, 55.8)])
def test_the_critical_delay_from_table_i(suite: tuple[Costs, float], critical_ms: float) -> None:
    costs, rate = suite
    assert geometric_critical_one_way_ms(costs, rate) == pytest.approx(critical_ms, abs=0.05)
    # and Table III's theory: its first delay with more than one draft is 83 ms, for both suites
    lens = [theory_draft_len(costs, rate, d, 32) for d in TABLE_III_DELAYS]
    assert next(d for d, k in zip(TABLE_III_DELAYS, lens, strict=True) if k > 1) == 83


@pytest.mark.parametrize("suite", TABLE_I)
def test_a_verification_takes_the_same_33_ms_for_every_k_of_table_i(suite: str) -> None:
    """So the paper's measurements follow `Costs` with `verify_ms_per_token` = 0, not its model."""
    _, verify_ms_per_token = TABLE_I[suite]
    spent = [(k + 1) * ms for k, ms in zip((1, 5, 10), verify_ms_per_token, strict=True)]
    assert spent == pytest.approx([33.7] * 3, abs=1.0)


def test_a_verifier_of_constant_time_moves_the_phase_transition_down() -> None:
    for costs, rate in (QWEN, LLAMA):
        constant = Costs(costs.draft_ms, verify_ms=33.0)
        assert (
            geometric_critical_one_way_ms(constant, rate)
            < geometric_critical_one_way_ms(costs, rate) - 15
        )


def test_the_models_of_a_round_are_the_papers() -> None:
    assert modelled_round_ms(Costs(10.0, 0.0, 3.0), 3).tolist() == [16, 29, 42]  # k·c_d + (k+1)·c_v
    assert modelled_round_ms(Costs(10.0, 33.0), 3).tolist() == [43, 53, 63]
    assert calibrated_round_ms([10.0, 8.0], [4.0, 3.0]).tolist() == [18, 25]


def test_each_baseline_decides_from_what_it_may_know() -> None:
    """LLaMA at the delays of Table III, costs and prefix interpolated between the tables' k.

    B6 explains the measured transition at 111 ms, and B4 and B5 come too early, as §VI-C has it.
    """
    draft_lens = np.arange(1, 11)
    draft_ms, verify_ms = (np.interp(draft_lens, [1, 5, 10], ms) for ms in TABLE_I["LLaMA"])
    round_ms = calibrated_round_ms(draft_ms.tolist(), verify_ms.tolist())
    prefix = np.exp(np.interp(draft_lens, [1, 3, 5, 7, 10], np.log(TABLE_II_LLAMA)))
    costs, rate = LLAMA
    theory = [theory_draft_len(costs, rate, d, 10) for d in TABLE_III_DELAYS]
    calibrated = [calibrated_draft_len(round_ms, rate, d) for d in TABLE_III_DELAYS]
    empirical = [optimal_draft_len(round_ms, prefix, d) for d in TABLE_III_DELAYS]
    assert greedy_draft_len(round_ms, prefix) == 1
    assert theory == [1, 1, 1, 1, 1, 3, 3, 4]
    assert calibrated == [1, 1, 1, 5, 5, 5, 5, 6]
    assert empirical == [1, 1, 1, 1, 1, 1, 5, 5]


@settings(deadline=None)
@given(curves(convex=False))
def test_the_greedy_baseline_never_drafts_more_than_the_optimum(curve) -> None:
    assert all(greedy_draft_len(*curve) <= optimal_draft_len(*curve, d) for d in (0, 1, 50, 5000))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(0, 1e12), min_size=1, max_size=8),
    st.lists(st.floats(0, 1), min_size=8, max_size=8),
    st.floats(0, 1e12),
    st.floats(5e-324, 1, exclude_max=True),
)
def test_nothing_is_nan_at_the_extremes_of_what_is_allowed(
    round_ms: list[float], chances: list[float], one_way_ms: float, rate: float
) -> None:
    prefix = np.array(sorted(chances, reverse=True)[: len(round_ms)])
    times_ms = np.array(round_ms)
    costs = Costs(*(round_ms + round_ms[:1] * 2)[:3])
    assert np.isfinite(cost_ms_per_token(times_ms, prefix, one_way_ms)).all()
    assert 1 <= marginal_draft_len(times_ms, prefix, one_way_ms) <= len(round_ms)
    assert critical_one_way_ms(times_ms, prefix) >= 0.0
    assert geometric_critical_one_way_ms(costs, rate) >= 0.0
    if costs.draft_ms + costs.verify_ms_per_token >= 1e-12:
        low, high = draft_len_envelope(costs, rate, one_way_ms)
        assert 1 <= low <= high


ROUND_MS, PREFIX = np.array([30.0, 40.0]), np.array([0.8, 0.6])
BAD_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, 1e300]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("one_way_ms", lambda x: optimal_draft_len(ROUND_MS, PREFIX, x)),
        ("one_way_ms", lambda x: marginal_draft_len(ROUND_MS, PREFIX, x)),
        ("one_way_ms", lambda x: draft_len_envelope(Costs(), 0.5, x)),
        ("round_ms", lambda x: optimal_draft_len(np.array([30.0, x]), PREFIX, 0.0)),
        ("round_ms", lambda x: critical_one_way_ms(np.array([x, 40.0]), PREFIX)),
        ("prefix", lambda x: expected_committed(np.array([x, 0.6]))),
        ("prefix", lambda x: expected_committed(np.array([0.8, x, 0.5]))),
        ("prefix", lambda x: expected_committed(np.array([0.8, x]))),
        ("acceptance_rate", lambda x: geometric_prefix(x, 3)),
        ("acceptance_rate", lambda x: draft_len_envelope(Costs(), x, 10.0)),
        ("acceptance_rate", lambda x: geometric_critical_one_way_ms(Costs(), x)),
        ("verify_ms", lambda x: modelled_round_ms(Costs(1.0, x), 3)),
        ("draft_ms", lambda x: geometric_critical_one_way_ms(Costs(x), 0.5)),
        ("draft_ms_per_token", lambda x: calibrated_round_ms([x], [1.0])),
        ("verify_ms_per_token", lambda x: calibrated_round_ms([1.0], [x])),
        ("accepted_at", lambda x: empirical_prefix([x], [3])),
    ],
)
def test_a_number_that_is_no_number_is_refused_by_name(named: str, call, bad: float) -> None:
    with pytest.raises(ValueError, match=f"^{named} "):
        call(bad)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("prefix", lambda: expected_committed(np.array([0.5, 0.6]))),
        ("prefix", lambda: expected_committed(np.array([]))),
        ("round_ms", lambda: optimal_draft_len(ROUND_MS[:1], PREFIX, 0.0)),
        ("verify_ms_per_token", lambda: calibrated_round_ms([1.0, 1.0], [1.0])),
        ("draft_ms_per_token", lambda: calibrated_round_ms([], [])),
        ("max_draft_len", lambda: geometric_prefix(0.5, 0)),
        ("tail_exponent", lambda: heavy_tailed_prefix(0.0, 3)),
        ("tail_exponent", lambda: heavy_tailed_prefix(math.nan, 3)),
        ("draft_ms [+] verify_ms_per_token", lambda: draft_len_envelope(Costs(0.0), 0.5, 1.0)),
        ("acceptance_rate", lambda: draft_len_envelope(Costs(), 1.0, 1.0)),
        ("judged_at", lambda: empirical_prefix([], [])),
        ("judged_at", lambda: empirical_prefix([0], [0])),
        ("accepted_at", lambda: empirical_prefix([1], [1, 1])),
        ("accepted_at", lambda: empirical_prefix([1], [math.nan])),
    ],
)
def test_curves_that_do_not_fit_are_refused_by_name(named: str, call) -> None:
    with pytest.raises(ValueError, match=f"^{named} "):
        call()
