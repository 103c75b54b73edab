"""Two-state links of R6: the state moves once per round, or by the clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from policies.links import Direction, LinkModel, Phase, markov_phases
from policies.player import Player
from serve_app.bench.studies.specstop_rounds import Policy, Rounds, Suite, player

MOVE = 0.1  # probability per round
PER_ROUND, SHORT, LONG = "per round", "stays of 3 s", "stays of 15 s"
STAYS_MS: Mapping[str, float] = {PER_ROUND: 0.0, SHORT: 3_000.0, LONG: 15_000.0}
STATES = 20_000  # of a path of rounds, which then begins again
PATH_MS = 3_600_000.0


class StatePerRound(Direction):
    """A link whose state is that of the round's number, whatever a round takes."""

    def __init__(self, phases: Sequence[Phase], states: Sequence[int], rounds: Rounds) -> None:
        super().__init__(LinkModel(tuple(phases)), np.random.default_rng(0))
        self._phases, self._states, self._rounds = phases, states, rounds

    def state(self) -> int:
        return self._states[self._rounds.ended % len(self._states)]

    def phase(self, at_ms: float) -> tuple[Phase, float]:
        return self._phases[self.state()], math.inf


def node_at(
    suite: Suite, good_bad_ms: tuple[float, float], moves: str, policy: Policy, seed: int
) -> tuple[Player, Rounds]:
    """A node whose rounds know the state that the link is in when they begin."""
    scenario = suite.at(0.0)
    (still,) = scenario.uplink.phases
    phases = [replace(still, one_way_ms=still.one_way_ms + delay_ms) for delay_ms in good_bad_ms]
    rng = np.random.default_rng(seed)
    if moves == PER_ROUND:
        node, rounds = player(scenario, policy)
        states = (np.cumsum(rng.random(STATES) < MOVE) % 2).tolist()
        link = StatePerRound(phases, states, rounds)
        node.uplink, node.downlink = link, StatePerRound(phases, states, rounds)
        rounds.state_now = link.state
        return node, rounds
    path = markov_phases(phases, STAYS_MS[moves], PATH_MS, rng)
    node, rounds = player(replace(scenario, uplink=LinkModel(path)), policy)
    bad_ms = phases[1].one_way_ms
    rounds.state_now = lambda: int(node.uplink.phase(node.timeline.now_ms)[0].one_way_ms == bad_ms)
    return node, rounds
