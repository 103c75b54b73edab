"""The draft length per network state: contextual UCB-SpecStop, and when it is worth its rounds.

A network state is a small number (0: good link, 1: bad link) that someone else observes.
Algorithms, theorems and sections are those of UCB-SpecStop (`specstop`, arXiv 2606.20591).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from policies.bandit import MAX_ROUND_MS, UcbSpecStop
from policies.saved import entries

SMALLEST_SPREAD = 0.1  # of the mean RTT: states nearer to each other than that share one best arm
RELEASE = 0.5  # a running contextual bandit stays until the spread is under this part of the bar


class ContextualUcb:
    """Algorithm 2 (§V-D): one `UcbSpecStop` per network state, each on the rounds of its state.

    Drift and horizon count the state's own rounds, so a state that was away comes back as it was
    left. The regret is that of `num_states` bandits; states are assumed not to depend on the arms.

    Each state's own cost C_s is what is learned. Its best arm is the one to play where a state
    lasts for a time. Where it lasts for a number of rounds, whatever the arm, the delay is the same
    addition to every arm's round, so that Σ N / Σ B over all states (Theorem 5) has one best arm
    for all, and a context cannot pay.
    """

    def __init__(
        self,
        draft_lens: Sequence[int],
        num_states: int,
        exploration: float = 0.25,
        discount: float = 0.99,
    ) -> None:
        if num_states < 1:
            raise ValueError(f"num_states must be >= 1, got {num_states}")
        self._by_state = [UcbSpecStop(draft_lens, exploration, discount) for _ in range(num_states)]

    @property
    def ignored(self) -> int:
        """Rounds that cannot have been, in any state."""
        return sum(bandit.ignored for bandit in self._by_state)

    def select(self, network_state: int) -> int:
        """The draft length of the next round in that state; ValueError if there is no such."""
        return self._bandit(network_state).select()

    def update(self, network_state: int, draft_len: int, round_ms: float, committed: int) -> None:
        """Learn from one round that was selected in that state; ValueError if no such state."""
        self._bandit(network_state).update(draft_len, round_ms, committed)

    def state(self) -> dict[str, object]:
        """What was learned, in plain JSON types."""
        return {"kind": "contextual_ucb", "states": [bandit.state() for bandit in self._by_state]}

    def restore(self, state: object) -> None:
        """Go on from a `state()`; ValueError if malformed or of other arms, and nothing changes."""
        (states,) = entries(state, "contextual_ucb", "states")
        if not isinstance(states, list) or len(states) != len(self._by_state):
            raise ValueError(f"states must be a list of {len(self._by_state)}, got {states!r:.200}")
        restored = [UcbSpecStop(b.draft_lens, b.exploration, b.discount) for b in self._by_state]
        for bandit, saved in zip(restored, states, strict=True):
            bandit.restore(saved)
        self._by_state = restored

    def _bandit(self, network_state: int) -> UcbSpecStop:
        if not 0 <= network_state < len(self._by_state):
            raise ValueError(
                f"network_state must be in [0, {len(self._by_state)}), got {network_state}"
            )
        return self._by_state[network_state]


def context_pays(
    rtts_ms: Sequence[Sequence[float]], critical_rtt_ms: float, contextual: bool
) -> bool:
    """Whether a bandit per state should run, given the recent RTTs seen in each network state.

    It pays if the states' best arms differ (Theorem 5), that is if their mean delays lie on both
    sides of the critical delay d_c of (24); `critical_rtt_ms` is 2 d_c. So the standard deviation
    between the states, weighted by their observations, must exceed the distance of the mean RTT
    from the critical one: for two states equally often this is exactly "on both sides". The
    scatter within a state does not count: without a context only the mean matters (Theorem 3), and
    what it is expected to add to the variance between the states is taken off.

    `contextual` is the answer before: a running context is given up only below half the bar. RTTs
    that are NaN, infinite or negative are left out, as is a state with fewer than two. Raises
    ValueError if `critical_rtt_ms` is not finite.
    """
    if not math.isfinite(critical_rtt_ms):
        raise ValueError(f"critical_rtt_ms must be finite, got {critical_rtt_ms}")
    usable = [[rtt for rtt in seen if 0.0 <= rtt <= MAX_ROUND_MS] for seen in rtts_ms]
    states = [seen for seen in usable if len(seen) >= 2]
    if len(states) < 2:
        return False
    total = sum(len(seen) for seen in states)
    mean_ms = sum(sum(seen) for seen in states) / total
    between = sum(len(seen) * (fmean(seen) - mean_ms) ** 2 for seen in states) / total
    by_chance = sum(np.var(s, ddof=1) * (1 - len(s) / total) for s in states) / total
    spread_ms = math.sqrt(max(0.0, between - by_chance))
    bar_ms = max(abs(mean_ms - critical_rtt_ms), SMALLEST_SPREAD * mean_ms)
    return spread_ms > (RELEASE * bar_ms if contextual else bar_ms)
