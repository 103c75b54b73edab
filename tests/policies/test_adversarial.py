"""EXP3 against its exact probabilities and simulated networks."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.adversarial import Exp3
from policies.bandit import UcbSpecStop
from tests.policies.network import World, play

ARMS = (0, 1, 3)
# k = 1 is the best by 15 % before 0 and 3
WORLD = World(acceptance_rate=0.6, draft_ms=36, verify_ms=30, rtt_ms=61.66)
any_round = st.tuples(
    st.integers(-1, 4), st.floats() | st.floats(1e-3, 1e6), st.integers(-1, 5) | st.floats()
)


class Drawn:
    """EXP3 with its generator, as a learner that draws for itself."""

    def __init__(self, bandit: Exp3, rng: np.random.Generator) -> None:
        self.bandit, self.rng = bandit, rng
        self.update = bandit.update

    def select(self) -> int:
        return self.bandit.select(self.rng)


def played(seed: int, rounds: int, bandit: Exp3 | None = None) -> tuple[Exp3, list[int]]:
    bandit, rng = bandit or Exp3(ARMS), np.random.default_rng(seed)
    return bandit, play(Drawn(bandit, rng), WORLD, rounds, rng)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(any_round, max_size=60),
    st.sampled_from([0.01, 0.1, 1.0]),
    st.sampled_from([1e-6, 0.001, 1.0]),
)
def test_whatever_comes_in_every_arm_keeps_its_floor_and_the_sum_is_1(
    rounds: list[tuple[int, float, int]], exploration: float, share: float
) -> None:
    bandit = Exp3(ARMS, exploration, share)
    for draft_len, round_ms, committed in rounds:
        bandit.update(draft_len, round_ms, committed)
        probabilities = bandit.probabilities()
        assert min(probabilities) >= exploration / len(ARMS) * (1 - 1e-12)
        assert sum(probabilities) == pytest.approx(1.0)
        saved = json.loads(json.dumps(bandit.state(), allow_nan=False))
    Exp3(ARMS).restore(saved if rounds else bandit.state())


def test_draws_follow_the_probabilities() -> None:
    """20,000 draws; a share off by five standard deviations: false alarm under 2e-6 for 3 arms."""
    bandit, _ = played(seed=1, rounds=300)
    rng = np.random.default_rng(2)
    draws = [bandit.select(rng) for _ in range(20_000)]
    for draft_len, probability in zip(ARMS, bandit.probabilities(), strict=True):
        deviation = math.sqrt(20_000 * probability * (1 - probability))
        assert abs(draws.count(draft_len) - 20_000 * probability) < 5 * deviation


def test_the_same_generator_draws_the_same_choices() -> None:
    assert played(seed=3, rounds=200)[1] == played(seed=3, rounds=200)[1]


def test_a_gain_moves_the_weights_by_the_rule() -> None:
    """w exp(γ x / (K p)), made of sum 1, then α/K to each: a first round that only sets λ, then
    one of twice the time, which has no spread yet but its own, so that x = -1 / sqrt(2) · 2 / 2."""
    bandit = Exp3((0, 1), exploration=0.2, share=0.01)
    bandit.update(0, 100.0, 1)
    assert bandit.probabilities() == pytest.approx([0.5, 0.5])
    bandit.update(1, 200.0, 1)
    recent_rounds = 1.0 + 0.99
    gain = -100.0 / (2.0 * math.sqrt(100.0**2 / recent_rounds))
    weight = math.exp(0.2 / 2 / 0.5 * gain)
    expected = 0.99 * weight / (1 + weight) + 0.01 / 2
    assert bandit.probabilities()[1] == pytest.approx(0.8 * expected + 0.1)


def test_the_best_arm_is_chosen_most() -> None:
    """The rounds 1500 to 3000; of 60 other seeds the least share of k = 1 was 0.77."""
    _, chosen = played(seed=4, rounds=3000)
    assert chosen[1500:].count(1) > 0.6 * 1500


@pytest.mark.parametrize("rounds", [200, 1000])
def test_200_rounds_after_acceptance_returns_speculation_does(rounds: int) -> None:
    """0 % for `rounds` rounds, then 95 %. Of 60 other seeds the least share of k = 6 was 0.92."""
    bandit, rng = Exp3((0, 6)), np.random.default_rng(5)
    play(Drawn(bandit, rng), World(0.0, 10, 30, 200), rounds, rng)
    after = play(Drawn(bandit, rng), World(0.95, 10, 30, 200), 1000, rng)
    assert after[200:].count(6) > 0.8 * 800


def test_the_choices_do_not_depend_on_the_unit_of_time() -> None:
    one, other = Exp3(ARMS), Exp3(ARMS)
    rng = np.random.default_rng(6)
    for _ in range(300):
        draft_len = one.select(rng)
        round_ms, committed = WORLD.round(draft_len, rng)
        one.update(draft_len, round_ms, committed)
        other.update(draft_len, 1024 * round_ms, committed)
    assert one.probabilities() == other.probabilities()


def test_a_suspended_first_round_is_taken_back_by_an_ordinary_one() -> None:
    bandit, spared = Exp3(ARMS), Exp3(ARMS)
    bandit.update(0, 3_600_000.0, 1)
    for each in (bandit, spared):
        each.update(1, 100.0, 2)
    assert bandit.state() == spared.state()


def test_one_round_of_an_hour_leaves_the_choice_as_it_was() -> None:
    bandit, _ = played(seed=7, rounds=2000)
    before = bandit.probabilities()
    bandit.update(1, 3_600_000.0, 1)
    assert bandit.probabilities() == pytest.approx(before, abs=0.1)
    _, after = played(seed=8, rounds=500, bandit=bandit)
    assert after.count(1) > 250


@pytest.mark.parametrize(
    ("draft_len", "round_ms", "committed"),
    [(1, math.nan, 1), (1, 0.0, 1), (1, math.inf, 1), (1, 50.0, 0), (1, 50.0, 3), (2, 50.0, 1)],
)
def test_what_cannot_have_been_a_round_is_counted_and_teaches_nothing(
    draft_len: int, round_ms: float, committed: int
) -> None:
    bandit, _ = played(seed=9, rounds=50)
    before = bandit.state()
    bandit.update(draft_len, round_ms, committed)
    assert bandit.state() == {**before, "ignored": 1}


def test_a_restored_bandit_goes_on_bit_for_bit() -> None:
    bandit, restored = played(seed=10, rounds=200)[0], Exp3(ARMS)
    restored.restore(json.loads(json.dumps(bandit.state(), allow_nan=False)))
    assert played(11, 200, bandit)[1] == played(11, 200, restored)[1]
    assert restored.state() == bandit.state()


FRESH: dict[str, Any] = Exp3(ARMS).state()


@pytest.mark.parametrize(
    "state",
    [
        None,
        UcbSpecStop(ARMS).state(),
        Exp3((0, 1)).state(),
        {**FRESH, "weights": [1.0, 0.0, 0.0]},
        {**FRESH, "weights": [0.5, 0.5, 0.5]},
        {**FRESH, "weights": [0.5, 0.5]},
        {**FRESH, "weights": [0.5, 0.25, math.nan]},
        {**FRESH, "tallies": [[0.0] * 4] * 2},
        {**FRESH, "ignored": 1.0},
        {**FRESH, "more": 1},
    ],
)
def test_a_foreign_or_malformed_state_is_refused_and_nothing_changes(state: object) -> None:
    bandit, _ = played(seed=12, rounds=50)
    before = bandit.state()
    with pytest.raises(ValueError, match="must"):
        bandit.restore(state)
    assert bandit.state() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), "draft_lens must be"),
        ((ARMS, 0.0), "exploration must be in .0, 1., got 0.0"),
        ((ARMS, math.nan), "exploration must be"),
        ((ARMS, 0.1, 0.0), "share must be in .0, 1., got 0.0"),
        ((ARMS, 0.1, 1.1), "share must be"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exp3(*arguments)
