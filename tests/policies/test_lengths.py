"""What the learners of draft lengths remember, and for how long."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from policies.bandit import UcbSpecStop
from policies.contextual import ContextualUcb
from policies.lengths import HALF_LIFE, AcceptanceCounts, BlindOrContextual, Planned
from policies.stopping import geometric_prefix

ARMS = tuple(range(5))


# --- acceptance by position


def test_few_counts_give_the_product_of_the_positions_own_rates() -> None:
    counts = AcceptanceCounts(4)
    for position, accepted in ((0, True), (1, True), (0, True), (1, False), (0, False), (9, True)):
        counts.observe(position, accepted)
    prefix = counts.prefix()
    assert prefix is not None
    rate = 3 / 5
    assert prefix == pytest.approx([2 / 3, 1 / 3, rate / 3, rate**2 / 3])
    assert counts.acceptance_rate == rate


def test_nothing_judged_is_nothing_known() -> None:
    counts = AcceptanceCounts(3)
    assert counts.prefix() is None
    assert counts.acceptance_rate is None


def test_a_judged_draft_counts_for_half_after_the_half_life() -> None:
    """From all to none: n half-lives later a share of 2^-n of the old is left."""
    counts = AcceptanceCounts(1)
    for _ in range(20 * int(HALF_LIFE)):
        counts.observe(0, True)
    assert counts.acceptance_rate == 1.0
    for half_lives in range(1, 5):
        for _ in range(int(HALF_LIFE)):
            counts.observe(0, False)
        # what is weighed in steps is off by less than one step of the fading
        assert counts.acceptance_rate == pytest.approx(0.5**half_lives, rel=0.05)


def test_a_rate_is_known_to_a_few_percent_however_long_it_goes_on() -> None:
    """0.8 at each of ten positions, within 5 standard errors at the weights that are left.

    Of 1.44 half-lives a share of 0.2 / (1 - 0.8^10) is judged first, and 0.8^9 of it last.
    Independent rounds: a false alarm has a probability under 10^-5.
    """
    rng = np.random.default_rng(3)
    counts = AcceptanceCounts(10)
    for draws in (rng.random((8_000, 10)) < 0.8).tolist():
        for position, accepted in enumerate(draws):
            counts.observe(position, accepted)
            if not accepted:
                break
    prefix = counts.prefix()
    assert prefix is not None
    rates = prefix / np.concatenate(([1.0], prefix[:-1]))
    first = HALF_LIFE / np.log(2.0) * 0.2 / (1.0 - 0.8**10)
    # old ones weigh less, so that as many of equal weight would be as good as half of their sum
    errors = np.sqrt(0.8 * 0.2 / (first * 2.0 * 0.8 ** np.arange(10)))
    assert (abs(rates - 0.8) < 5.0 * errors).all()
    assert errors[0] < 0.02
    assert errors[9] < 0.05


def test_a_position_that_is_drafted_no_more_is_forgotten_in_time() -> None:
    """A bad spell at position 1; then only position 0 is drafted, and it always stands."""
    counts = AcceptanceCounts(2)
    for _ in range(100):
        counts.observe(0, True)
        counts.observe(1, False)
    half_lives_until_half_a_draft = np.log2(100 / 0.5)
    for _ in range(int((half_lives_until_half_a_draft + 0.5) * HALF_LIFE)):
        counts.observe(0, True)
    prefix = counts.prefix()
    assert prefix is not None
    assert prefix == pytest.approx(geometric_prefix(1.0, 2))


# --- blind or contextual


def test_a_round_is_learned_from_in_the_state_it_was_planned_in() -> None:
    """Whatever the network is by then, as other sessions have seen."""
    bandit, blind, by_state = BlindOrContextual(ARMS), UcbSpecStop(ARMS), ContextualUcb(ARMS, 2)
    for draft_len, state in product((0, 3), (0, 1)):
        bandit.observe_rtt(300.0 * (1 - state), None)
        bandit.update(Planned(draft_len, state), 100.0, 1)
        blind.update(draft_len, 100.0, 1)
        by_state.update(state, draft_len, 100.0, 1)
    assert bandit.state() == {
        "kind": "ucb",
        "blind": blind.state(),
        "by_state": by_state.state(),
    }


def test_what_is_selected_names_the_state_of_the_last_round_trip() -> None:
    bandit = BlindOrContextual(ARMS)
    for rtt_ms in [5.0, 300.0] * 32:  # both states, and their boundary is between them
        bandit.observe_rtt(rtt_ms, 100.0)
    states = []
    for rtt_ms in (5.0, 300.0, 300.0, 5.0):
        bandit.observe_rtt(rtt_ms, 100.0)
        states.append(bandit.select().network_state)
    assert states == [0, 1, 1, 0]


def test_a_state_that_is_refused_changes_neither_form() -> None:
    bandit, other = BlindOrContextual(ARMS), BlindOrContextual(ARMS)
    for draft_len, state in product(ARMS, (0, 1)):
        bandit.update(Planned(draft_len, state), 50.0, 1)
        other.update(Planned(draft_len, state), 80.0, 1)
    before, good = bandit.state(), other.state()
    foreign = BlindOrContextual((1, 2)).state()
    for state in (
        None,
        {"kind": "ucb"},
        good | {"kind": "exp3"},
        good | {"more": 1},
        good | {"blind": foreign["blind"]},
        good | {"by_state": foreign["by_state"]},  # after a blind form that is right
        good | {"by_state": None},
    ):
        with pytest.raises(ValueError, match=r"must"):
            bandit.restore(state)
        assert bandit.state() == before
    bandit.restore(json.loads(json.dumps(good, allow_nan=False)))
    assert bandit.state() == good
