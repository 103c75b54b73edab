"""State-dependent draft lengths against every policy there is, and against simulated networks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.costs import Costs
from policies.markov import (
    StoppingRule,
    best_draft_lens,
    best_stopping_rule,
    per_state_draft_lens,
    round_weighted_cost,
    state_rounds_ms,
    stationary_distribution,
    time_weighted_cost,
    time_weighted_value_ms,
    value_of_information_ms,
)
from policies.stopping import geometric_prefix, modelled_round_ms, optimal_draft_len

# Table I's averages and Table VII's delays of the Qwen suite, good and bad state.
QWEN_ROUND_MS = modelled_round_ms(Costs(85.14, 0.0, 8.09), 10)
QWEN_PREFIX = geometric_prefix(0.828, 10)
QWEN_DELAYS_MS = np.array([37.0, 111.0])
HALVES = np.array([0.5, 0.5])
FROZEN = np.eye(2)


@st.composite
def shares(draw: st.DrawFn, states: int) -> np.ndarray:
    weights = draw(st.lists(st.integers(0, 20), min_size=states, max_size=states).filter(any))
    return np.array(weights) / sum(weights)


@st.composite
def chains(draw: st.DrawFn, states: int) -> np.ndarray:
    return np.array([draw(shares(states)) for _ in range(states)])


@st.composite
def prefixes(draw: st.DrawFn, max_draft_len: int) -> np.ndarray:
    chances = draw(st.lists(st.floats(0, 1), min_size=max_draft_len, max_size=max_draft_len))
    return np.array(sorted(chances, reverse=True))


@st.composite
def any_rounds(draw: st.DrawFn, states: int, max_draft_len: int) -> np.ndarray:
    cells = st.lists(st.floats(1, 500), min_size=max_draft_len, max_size=max_draft_len)
    return np.array([draw(cells) for _ in range(states)])


@st.composite
def delayed_rounds(draw: st.DrawFn, states: int, max_draft_len: int) -> np.ndarray:
    """The paper's model: convex round times and a delay per state, never falling."""
    first, *steps = draw(
        st.lists(st.floats(1, 100), min_size=max_draft_len, max_size=max_draft_len)
    )
    delays = draw(st.lists(st.floats(0, 300), min_size=states, max_size=states))
    return state_rounds_ms(np.cumsum([first, *sorted(steps)]), np.array(sorted(delays)))


def expectation(
    stops: np.ndarray, rounds_ms: np.ndarray, prefix: np.ndarray, chain: np.ndarray, start
) -> float:
    """E[ms] / E[tokens] of a stopping rule, path by path through the states."""
    ms = tokens = 0.0
    max_draft_len, states = stops.shape
    for path in itertools.product(range(states), repeat=max_draft_len):
        steps = [start[path[0]], *(chain[s, t] for s, t in itertools.pairwise(path))]
        n = next(n for n, s in enumerate(path) if stops[n, s])
        ms += math.prod(steps) * rounds_ms[path[n], n]
        tokens += math.prod(steps) * (1 + prefix[: n + 1].sum())
    return ms / tokens


def every_rule(max_draft_len: int, states: int):
    for cells in itertools.product([False, True], repeat=(max_draft_len - 1) * states):
        yield np.array([*cells, *[True] * states]).reshape(max_draft_len, states)


@settings(deadline=None)
@given(st.data(), st.integers(1, 5))
def test_the_stationary_distribution_is_kept_by_the_chain(data, states: int) -> None:
    chain = 0.9 * data.draw(chains(states)) + 0.1 / states
    share = stationary_distribution(chain)
    assert share.sum() == pytest.approx(1.0)
    assert share @ chain == pytest.approx(share, abs=1e-12)


def test_the_stationary_distribution_of_two_states_has_the_closed_form() -> None:
    """Also where both moves are rarer than the rounding of 1 - 1e-20."""
    for worsens, improves in ((0.1, 0.1), (0.3, 0.7), (1e-20, 3e-20)):
        chain = np.array([[1 - worsens, worsens], [improves, 1 - improves]])
        share = np.array([improves, worsens]) / (worsens + improves)
        assert stationary_distribution(chain) == pytest.approx(share, rel=1e-12)


def test_a_transient_state_has_no_share_and_a_split_chain_no_distribution() -> None:
    for order in itertools.permutations(range(3)):
        chain = np.array([[0.2, 0.8, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])[np.ix_(order, order)]
        share = np.array([0.0, 2 / 3, 1 / 3])[list(order)]
        assert stationary_distribution(chain) == pytest.approx(share)
    with pytest.raises(ValueError, match="one stationary distribution"):
        stationary_distribution(np.array([[1.0, 0.0, 0.0], [0.3, 0.4, 0.3], [0.0, 0.0, 1.0]]))


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_no_choice_of_lengths_by_state_beats_dinkelbachs(data, states: int, most: int) -> None:
    """All K^|S| of them, for any round times and weights."""
    rounds_ms, prefix = data.draw(any_rounds(states, most)), data.draw(prefixes(most))
    weights = data.draw(shares(states))
    best = round_weighted_cost(
        rounds_ms, prefix, weights, best_draft_lens(rounds_ms, prefix, weights)
    )
    every = itertools.product(range(1, most + 1), repeat=states)
    least = min(round_weighted_cost(rounds_ms, prefix, weights, lens) for lens in every)
    assert best == pytest.approx(least, rel=1e-12)


def test_dinkelbach_goes_on_until_no_price_is_lower() -> None:
    """Long drafts over a long delay: from the cheapest round it takes several prices."""
    round_ms, prefix = modelled_round_ms(Costs(5.0, 30.0), 32), geometric_prefix(0.97, 32)
    rounds_ms = state_rounds_ms(round_ms, np.array([100.0, 900.0]))
    rounds_ms[1] += 40.0 * np.arange(32)
    best = best_draft_lens(rounds_ms, prefix, HALVES)
    every = itertools.product(range(1, 33), repeat=2)
    assert best == min(every, key=lambda k: round_weighted_cost(rounds_ms, prefix, HALVES, k))


def test_lengths_differ_by_state_where_the_state_makes_drafts_dearer() -> None:
    rounds_ms = state_rounds_ms(QWEN_ROUND_MS, np.array([100.0, 100.0]))
    rounds_ms[1] += 100.0 * np.arange(10)
    lens = best_draft_lens(rounds_ms, QWEN_PREFIX, HALVES)
    assert lens[0] > lens[1]


def test_the_contextual_cost_is_the_ratio_of_sums_over_a_simulated_channel() -> None:
    """|z| < 5 on rounds of a slow two-state channel: false-alarm probability about 1e-6.

    Rounds of one state are correlated, so the deviation is taken over blocks of 500 rounds.
    """
    rng, lens, rounds = np.random.default_rng(3), np.array([1, 4]), 400_000
    moves = rng.random(rounds) < 0.1  # Table VII: 0.1 both ways
    states = np.cumsum(moves) % 2
    rounds_ms = state_rounds_ms(QWEN_ROUND_MS, QWEN_DELAYS_MS)
    cost = round_weighted_cost(rounds_ms, QWEN_PREFIX, HALVES, lens.tolist())
    drafted = lens[states]
    stood = np.minimum(rng.geometric(1 - 0.828, rounds) - 1, drafted)
    excess = rounds_ms[states, drafted - 1] - cost * (1 + stood)
    blocks = excess.reshape(-1, 500).mean(axis=1)
    assert abs(blocks.mean() / (blocks.std() / math.sqrt(blocks.size))) < 5


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_a_delay_seen_before_the_round_is_worth_nothing_per_round(data, states, most) -> None:
    """C_ctx* = min_k C_ctx(κ_k), Theorem 5 with equality: the delay is paid whatever is drafted.

    And the one best length is that of the mean delay [Theorem 3].
    """
    delays = data.draw(st.lists(st.floats(0, 300), min_size=states, max_size=states))
    round_ms = np.array(data.draw(st.lists(st.floats(1, 500), min_size=most, max_size=most)))
    prefix, weights = data.draw(prefixes(most)), data.draw(shares(states))
    rounds_ms = state_rounds_ms(round_ms, np.array(delays))
    best = best_draft_lens(rounds_ms, prefix, weights)
    blind = optimal_draft_len(round_ms, prefix, float(weights @ delays))
    costs = [round_weighted_cost(rounds_ms, prefix, weights, k) for k in (best, [blind] * states)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-12)
    frozen = np.eye(states)
    assert value_of_information_ms(rounds_ms, prefix, frozen, weights) < 1e-9 * costs[1]


def test_the_lengths_that_are_best_in_each_state_lose_to_one_length_per_round() -> None:
    """Table VII's setting: k*(s) = 1 and 3 cost more than 2 in both, by the paper's own C_ctx."""
    rounds_ms = state_rounds_ms(QWEN_ROUND_MS, QWEN_DELAYS_MS)
    per_state = per_state_draft_lens(rounds_ms, QWEN_PREFIX)
    one = best_draft_lens(rounds_ms, QWEN_PREFIX, HALVES)
    assert per_state == (1, 3)
    assert len(set(one)) == 1
    costs = [round_weighted_cost(rounds_ms, QWEN_PREFIX, HALVES, lens) for lens in (one, per_state)]
    assert costs[0] < costs[1]


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_the_lengths_that_are_best_in_each_state_are_best_per_time(data, states, most) -> None:
    rounds_ms, prefix = data.draw(any_rounds(states, most)), data.draw(prefixes(most))
    weights = data.draw(shares(states))

    def cost(lens) -> float:
        return time_weighted_cost(rounds_ms, prefix, weights, lens)

    best = cost(per_state_draft_lens(rounds_ms, prefix))
    every = itertools.product(range(1, most + 1), repeat=states)
    assert best == pytest.approx(min(cost(lens) for lens in every), rel=1e-12)
    blind = min(cost([k] * states) for k in range(1, most + 1))
    value = time_weighted_value_ms(rounds_ms, prefix, weights)
    assert value == pytest.approx(blind - best, rel=1e-9, abs=1e-9)


def test_per_time_information_is_worth_something_only_if_optima_differ() -> None:
    near = state_rounds_ms(QWEN_ROUND_MS, np.array([80.0, 85.0]))
    far = state_rounds_ms(QWEN_ROUND_MS, QWEN_DELAYS_MS)
    assert len(set(per_state_draft_lens(near, QWEN_PREFIX))) == 1
    assert time_weighted_value_ms(near, QWEN_PREFIX, HALVES) == 0.0
    assert time_weighted_value_ms(far, QWEN_PREFIX, HALVES) > 1.0
    assert time_weighted_value_ms(far, QWEN_PREFIX, np.array([0.0, 1.0])) == 0.0


def test_the_time_weighted_cost_is_that_of_long_stays_in_each_state() -> None:
    """Half of an hour in each state, round after round: elapsed time over expected tokens."""
    lens, rounds_ms = (1, 3), state_rounds_ms(QWEN_ROUND_MS, QWEN_DELAYS_MS)
    tokens = 0.0
    for state, k in enumerate(lens):
        rounds = 1_800_000.0 / rounds_ms[state, k - 1]
        tokens += rounds * (1 + QWEN_PREFIX[:k].sum())
    cost = time_weighted_cost(rounds_ms, QWEN_PREFIX, HALVES, lens)
    assert cost == pytest.approx(3_600_000.0 / tokens)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 2), st.integers(1, 4))
def test_no_stopping_rule_beats_the_dynamic_program(data, states: int, most: int) -> None:
    """Every rule that looks at the draft and the state, each evaluated path by path."""
    rounds_ms, prefix = data.draw(any_rounds(states, most)), data.draw(prefixes(most))
    model = (rounds_ms, prefix, data.draw(chains(states)), data.draw(shares(states)))
    found = best_stopping_rule(*model)
    assert found.cost_ms_per_token == pytest.approx(expectation(found.stops, *model), rel=1e-12)
    least = min(expectation(stops, *model) for stops in every_rule(most, states))
    assert found.cost_ms_per_token == pytest.approx(least, rel=1e-12)


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 6))
def test_a_state_that_stands_still_within_a_round_gives_the_contextual_optimum(
    data, states: int, most: int
) -> None:
    rounds_ms, prefix = data.draw(any_rounds(states, most)), data.draw(prefixes(most))
    weights = data.draw(shares(states))
    rule = best_stopping_rule(rounds_ms, prefix, np.eye(states), weights)
    lens = best_draft_lens(rounds_ms, prefix, weights)
    contextual = round_weighted_cost(rounds_ms, prefix, weights, lens)
    assert rule.cost_ms_per_token == pytest.approx(contextual, rel=1e-12)


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 8))
def test_a_delay_by_state_gives_thresholds(data, states: int, most: int) -> None:
    """Hypothesis (i) of Proposition 1 holds for any chain, if only the delay depends on it."""
    model = (data.draw(delayed_rounds(states, most)), data.draw(prefixes(most)))
    rule = best_stopping_rule(*model, data.draw(chains(states)), data.draw(shares(states)))
    assert rule.thresholds() is not None


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.floats(0, 1))
def test_the_worse_the_state_the_higher_its_threshold(
    data, states: int, most: int, stay: float
) -> None:
    """Proposition 1, where the state stays or is drawn anew: monotone, and drifting to the mean."""
    redrawn = data.draw(shares(states))
    chain = stay * np.eye(states) + (1 - stay) * redrawn
    model = (data.draw(delayed_rounds(states, most)), data.draw(prefixes(most)))
    thresholds = best_stopping_rule(*model, chain, redrawn).thresholds()
    assert thresholds is not None
    assert list(thresholds) == sorted(thresholds)


def test_thresholds_can_fall_where_transitions_are_not_monotone() -> None:
    """Hypothesis (ii) is needed: here the middle state turns good next, and the bad one never."""
    chain = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    rounds_ms = state_rounds_ms(QWEN_ROUND_MS, np.array([10.0, 200.0, 210.0]))
    rule = best_stopping_rule(rounds_ms, QWEN_PREFIX, chain, np.full(3, 1 / 3))
    thresholds = rule.thresholds()
    assert thresholds is not None
    assert thresholds[1] > thresholds[2]


def test_a_rule_that_stops_early_and_not_later_has_no_thresholds() -> None:
    stops = np.array([[True, False], [False, False], [True, True]])
    assert StoppingRule(stops, 1.0).thresholds() is None


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 5))
def test_seeing_the_state_while_drafting_never_costs(data, states: int, most: int) -> None:
    """Theorem 5 for the program of Proposition 1: a fixed length is a rule that looks away."""
    rounds_ms, prefix = data.draw(any_rounds(states, most)), data.draw(prefixes(most))
    chain, start = data.draw(chains(states)), data.draw(shares(states))
    seen = best_stopping_rule(rounds_ms, prefix, chain, start).cost_ms_per_token
    blind = min(
        float(start @ np.linalg.matrix_power(chain, n) @ rounds_ms[:, n])
        / (1 + prefix[: n + 1].sum())
        for n in range(most)
    )
    assert seen <= blind * (1 + 1e-12)
    value = value_of_information_ms(rounds_ms, prefix, chain, start)
    assert value == pytest.approx(max(0.0, blind - seen), rel=1e-9, abs=1e-9)


def test_seeing_a_bad_state_pass_while_drafting_pays() -> None:
    rounds_ms = state_rounds_ms(QWEN_ROUND_MS, QWEN_DELAYS_MS)
    moving = np.array([[0.9, 0.1], [0.4, 0.6]])
    assert value_of_information_ms(rounds_ms, QWEN_PREFIX, moving, HALVES) > 1.0
    same = state_rounds_ms(QWEN_ROUND_MS, np.array([60.0, 60.0]))
    assert value_of_information_ms(same, QWEN_PREFIX, moving, HALVES) == pytest.approx(0, abs=1e-9)


ROUNDS_MS, PREFIX = np.array([[30.0, 40.0], [60.0, 70.0]]), np.array([0.8, 0.6])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("round_ms", lambda x: state_rounds_ms(np.array([30.0, x]), np.array([1.0]))),
        ("one_way_ms", lambda x: state_rounds_ms(np.array([30.0]), np.array([1.0, x]))),
        ("rounds_ms", lambda x: best_draft_lens(np.array([[30.0, x]]), PREFIX, np.ones(1))),
        ("prefix", lambda x: per_state_draft_lens(ROUNDS_MS, np.array([0.8, x]))),
        ("round_shares", lambda x: best_draft_lens(ROUNDS_MS, PREFIX, np.array([0.5, x]))),
        ("time_shares", lambda x: time_weighted_value_ms(ROUNDS_MS, PREFIX, np.array([x, 0.5]))),
        ("start_shares", lambda x: best_stopping_rule(ROUNDS_MS, PREFIX, FROZEN, np.array([0, x]))),
        ("transitions", lambda x: stationary_distribution(np.array([[1.0, 0.0], [0.5, x]]))),
        (
            "transitions",
            lambda x: best_stopping_rule(ROUNDS_MS, PREFIX, np.full((2, 2), x), HALVES),
        ),
    ],
)
def test_a_number_that_is_no_number_is_refused_by_name(named: str, call, bad: float) -> None:
    with pytest.raises(ValueError, match=f"^{named}[ ']"):
        call(bad)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("rounds_ms", lambda: per_state_draft_lens(ROUNDS_MS[0], PREFIX)),
        ("rounds_ms", lambda: per_state_draft_lens(ROUNDS_MS, PREFIX[:1])),
        ("rounds_ms", lambda: per_state_draft_lens(ROUNDS_MS * 0.0, PREFIX)),
        ("round_shares", lambda: best_draft_lens(ROUNDS_MS, PREFIX, np.ones(1))),
        ("round_shares", lambda: best_draft_lens(ROUNDS_MS, PREFIX, np.array([1.5, -0.5]))),
        ("transitions", lambda: stationary_distribution(np.ones((2, 3)))),
        ("transitions", lambda: stationary_distribution(np.ones(()))),
        ("transitions", lambda: stationary_distribution(np.ones((0, 0)))),
        ("transitions", lambda: best_stopping_rule(ROUNDS_MS, PREFIX, np.eye(3), HALVES)),
        ("draft_lens", lambda: round_weighted_cost(ROUNDS_MS, PREFIX, HALVES, [1])),
        ("draft_lens", lambda: round_weighted_cost(ROUNDS_MS, PREFIX, HALVES, [0, 1])),
        ("draft_lens", lambda: time_weighted_cost(ROUNDS_MS, PREFIX, HALVES, [1, 3])),
        ("draft_lens", lambda: time_weighted_cost(ROUNDS_MS, PREFIX, HALVES, [1, 1.5])),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(named: str, call) -> None:
    with pytest.raises(ValueError, match=f"^{named} "):
        call()
