"""The contextual bandit on a two-state link, and when a context pays."""

from __future__ import annotations

import json
import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.bandit import UcbSpecStop
from policies.contextual import RELEASE, SMALLEST_SPREAD, ContextualUcb, context_pays
from tests.policies.network import World

ARMS = tuple(range(5))
GOOD = World(acceptance_rate=0.7, draft_ms=36, verify_ms=30, rtt_ms=5)
BAD = World(acceptance_rate=0.7, draft_ms=36, verify_ms=30, rtt_ms=300)


def on_a_changing_link(bandit: UcbSpecStop | ContextualUcb, seed: int) -> tuple[float, int]:
    """What 200 s lasted and committed, if the link is good for 2 s and bad for 8 s, in turns."""
    rng, now_ms, tokens = np.random.default_rng(seed), 0.0, 0
    while now_ms < 200_000:
        bad = now_ms % 10_000 >= 2_000
        if isinstance(bandit, ContextualUcb):
            draft_len = bandit.select(int(bad))
            round_ms, committed = (BAD if bad else GOOD).round(draft_len, rng)
            bandit.update(int(bad), draft_len, round_ms, committed)
        else:
            draft_len = bandit.select()
            round_ms, committed = (BAD if bad else GOOD).round(draft_len, rng)
            bandit.update(draft_len, round_ms, committed)
        now_ms, tokens = now_ms + round_ms, tokens + committed
    return now_ms, tokens


# --- contextual UCB-SpecStop -------------------------------------------------------------------


def test_knowing_the_state_of_a_link_that_changes_every_few_seconds_saves_5_per_cent() -> None:
    """As §VI-F, 10 clients. Twenty sets of 10 others saved 12.3 % at least, 13.5 % on average."""
    blind, sensed = np.zeros(2), np.zeros(2)
    for seed in range(10):
        blind += on_a_changing_link(UcbSpecStop(ARMS), seed)
        sensed += on_a_changing_link(ContextualUcb(ARMS, num_states=2), seed)
    assert sensed[0] / sensed[1] < 0.95 * blind[0] / blind[1]


@settings(deadline=None)
@given(st.floats(0.1, 0.9), st.floats(1, 100), st.lists(st.floats(0, 500), min_size=2, max_size=2))
def test_where_states_last_for_rounds_the_same_arm_is_best_in_all(
    acceptance_rate: float, draft_ms: float, rtts_ms: list[float]
) -> None:
    """Theorem 5's cost by brute force over the arms of two states of equal weight."""
    worlds = [World(acceptance_rate, draft_ms, 30, rtt_ms) for rtt_ms in rtts_ms]

    def cost_ms(arms: tuple[int, ...]) -> float:
        tokens = [sum(acceptance_rate**i for i in range(arm + 1)) for arm in arms]
        costs = [world.cost_ms(arm) for world, arm in zip(worlds, arms, strict=True)]
        return float(np.dot(tokens, costs) / sum(tokens))

    best_ms = min(cost_ms(arms) for arms in product(ARMS, repeat=2))
    assert min(cost_ms((arm, arm)) for arm in ARMS) == pytest.approx(best_ms, rel=1e-12)


def test_a_state_learns_from_its_own_rounds_only() -> None:
    bandit, alone = ContextualUcb(ARMS, num_states=2), UcbSpecStop(ARMS)
    rng = np.random.default_rng(1)
    for _ in range(200):
        draft_len = bandit.select(1)
        assert draft_len == alone.select()
        one_round = BAD.round(draft_len, rng)
        bandit.update(1, draft_len, *one_round)
        alone.update(draft_len, *one_round)
        draft_len = bandit.select(0)
        bandit.update(0, draft_len, *GOOD.round(draft_len, rng))


def test_bad_rounds_of_all_states_are_counted_together() -> None:
    bandit = ContextualUcb(ARMS, num_states=3)
    bandit.update(0, 1, math.nan, 1)
    bandit.update(2, 1, 50.0, 9)
    assert bandit.ignored == 2


def test_a_state_there_is_not_is_refused_by_name() -> None:
    bandit = ContextualUcb(ARMS, num_states=2)
    for network_state in (-1, 2):
        with pytest.raises(ValueError, match=f"network_state must be in .*, got {network_state}"):
            bandit.select(network_state)
        with pytest.raises(ValueError, match=f"network_state must be in .*, got {network_state}"):
            bandit.update(network_state, 1, 50.0, 1)
    with pytest.raises(ValueError, match="num_states must be >= 1, got 0"):
        ContextualUcb(ARMS, num_states=0)


def test_a_restored_bandit_goes_on_bit_for_bit() -> None:
    bandit, restored = (ContextualUcb(ARMS, num_states=2) for _ in range(2))
    on_a_changing_link(bandit, seed=1)
    restored.restore(json.loads(json.dumps(bandit.state(), allow_nan=False)))
    for each in (bandit, restored):
        on_a_changing_link(each, seed=2)
    assert restored.state() == bandit.state()


def test_a_state_that_is_malformed_in_one_place_changes_nothing() -> None:
    bandit = ContextualUcb(ARMS, num_states=2)
    on_a_changing_link(bandit, seed=1)
    before = bandit.state()
    fresh = UcbSpecStop(ARMS).state()
    for states in (None, [fresh], [fresh] * 3, [fresh, None], [fresh, UcbSpecStop((1,)).state()]):
        with pytest.raises(ValueError, match="must"):
            bandit.restore({"kind": "contextual_ucb", "states": states})
    with pytest.raises(ValueError, match="state must be"):
        bandit.restore(fresh)
    assert bandit.state() == before


# --- when a context pays -----------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(1, 500), st.floats(1, 500), st.floats(1, 500))
def test_two_states_equally_often_pay_if_they_lie_on_both_sides_of_the_critical_delay(
    rtt_ms: float, other_ms: float, critical_rtt_ms: float
) -> None:
    near, far = sorted((rtt_ms, other_ms))
    mean_ms, spread_ms = (near + far) / 2, (far - near) / 2
    assume(abs(spread_ms - abs(mean_ms - critical_rtt_ms)) > 1e-6 * mean_ms)
    assume(abs(spread_ms - SMALLEST_SPREAD * mean_ms) > 1e-6 * mean_ms)
    pays = near < critical_rtt_ms < far and spread_ms > SMALLEST_SPREAD * mean_ms
    assert context_pays([[near] * 5, [far] * 5], critical_rtt_ms, contextual=False) == pays


def test_an_answer_once_given_holds_until_the_spread_has_halved() -> None:
    def pays(spread_ms: float, contextual: bool) -> bool:
        rtts_ms = [[200 - spread_ms] * 9, [200 + spread_ms] * 9]
        return context_pays(rtts_ms, critical_rtt_ms=150.0, contextual=contextual)

    bar_ms = 50.0
    assert [pays(s * bar_ms, contextual=False) for s in (0.99, 1.01)] == [False, True]
    assert [pays(s * RELEASE * bar_ms, contextual=True) for s in (0.99, 1.01)] == [False, True]


def test_the_scatter_of_the_means_is_taken_off_what_lies_between_them() -> None:
    """Two observations, 200 ± 30 ± s: (30² - s² / 2) ms² between the states, the bar is 20 ms."""

    def pays(s: float) -> bool:
        rtts_ms = [[170 - s, 170 + s], [230 - s, 230 + s]]
        return context_pays(rtts_ms, critical_rtt_ms=200.0, contextual=False)

    assert [pays(0.99 * math.sqrt(1000)), pays(1.01 * math.sqrt(1000))] == [True, False]


def test_states_that_only_look_different_by_chance_do_not_pay() -> None:
    """1000 times two states of RTT 100 ± 30 ms, 5 observations each, at the critical delay.

    Half the difference of the means has a variance of 90 ms², which is taken off, so that beyond
    sqrt(90 + 100) ms they seem to pay: probability 0.15, and 220 would be 6 standard deviations
    too many. With nothing taken off it would be 0.29.
    """
    rng = np.random.default_rng(1)
    seen = rng.normal(100, 30, (1000, 2, 5)).clip(0).tolist()
    assert sum(context_pays(rtts_ms, 100.0, contextual=False) for rtts_ms in seen) < 220


def test_a_wandering_link_at_the_bar_does_not_make_the_answer_flip() -> None:
    """The states' RTTs, 20 observations each with a scatter of 10 %, at the bar for 500 looks.

    It turned once in each of 300 other runs.
    """
    rng, answers = np.random.default_rng(2), [False]
    for _ in range(500):
        rtts_ms = [rng.normal(mean, mean / 10, 20).tolist() for mean in (150, 250)]
        answers.append(context_pays(rtts_ms, 150.0, contextual=answers[-1]))
    assert sum(before != after for before, after in pairwise(answers)) <= 1


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.floats(), max_size=6), max_size=4), st.floats(-1e3, 1e3))
def test_absurd_delays_are_left_out(rtts_ms: list[list[float]], critical_rtt_ms: float) -> None:
    usable = [[rtt for rtt in seen if 0 <= rtt <= 86_400_000] for seen in rtts_ms]
    for contextual in (False, True):
        expected = context_pays(usable, critical_rtt_ms, contextual)
        assert context_pays(rtts_ms, critical_rtt_ms, contextual) is expected


def test_one_state_or_one_observation_never_pays() -> None:
    for rtts_ms in ([], [[]], [[5.0, 5.0]], [[5.0] * 9, [300.0]], [[5.0] * 9, [math.nan] * 9]):
        assert not context_pays(rtts_ms, 100.0, contextual=True)


def test_a_critical_delay_that_is_no_number_is_refused() -> None:
    for critical_rtt_ms in (math.nan, math.inf):
        with pytest.raises(ValueError, match="critical_rtt_ms must be finite"):
            context_pays([[5.0] * 2, [300.0] * 2], critical_rtt_ms, contextual=False)
