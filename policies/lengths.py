"""The draft length of the next round, for methods that choose one: oracles and bandits.

The oracles B2, B4, B5 and B6 of UCB-SpecStop (§VI-D) know their costs and acceptances; here both
are estimates from the rounds so far, which makes them the plug-in forms of those oracles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.adversarial import Exp3
from policies.bandit import NaiveUcb, UcbSpecStop
from policies.contextual import ContextualUcb, context_pays
from policies.control import Answered, RoundEnded
from policies.environment import Environment
from policies.saved import entries
from policies.stopping import (
    Floats,
    calibrated_draft_len,
    critical_one_way_ms,
    empirical_prefix,
    geometric_prefix,
    greedy_draft_len,
    modelled_round_ms,
    optimal_draft_len,
    theory_draft_len,
)

RTT_WINDOW = 128  # round trips that tell the network's states apart
_REVIEW_EVERY = 64  # round trips between two looks at them
_KNOWN_ROUNDS = 3  # of one length before their mean is taken for its cost
# Judged drafts after which one counts for half: some twenty answers, so that no single one decides,
# and enough that the first position's rate is known to 2 % and the tenth's to 5 % (at 80 %).
HALF_LIFE = 2_000.0
_FADE_EVERY = 64  # judged drafts
_FORGOTTEN = 0.5  # a position that weighs less counts as never judged


class AcceptanceCounts:
    """Drafts judged and accepted, by their position in the NAV; old ones weigh less.

    Each weighs half after HALF_LIFE more judged drafts, of any position. A position that is not
    drafted any more is forgotten in time, so a bad spell does not keep drafts short for ever.
    """

    def __init__(self, max_draft_len: int) -> None:
        self._accepted = [0.0] * max_draft_len
        self._judged = [0.0] * max_draft_len
        self._until_fade = _FADE_EVERY

    def observe(self, position: int, accepted: bool) -> None:
        """A verdict on the draft at that position of its NAV, from 0."""
        if position >= len(self._judged):
            return
        self._judged[position] += 1.0
        self._accepted[position] += accepted
        self._until_fade -= 1
        if not self._until_fade:
            self._fade()
            self._until_fade = _FADE_EVERY

    def _fade(self) -> None:
        keep = 2.0 ** (-_FADE_EVERY / HALF_LIFE)
        for position, judged in enumerate(self._judged):
            kept = keep if judged * keep >= _FORGOTTEN else 0.0
            self._judged[position] *= kept
            self._accepted[position] *= kept

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / judged; None before any draft was judged."""
        judged = sum(self._judged)
        return sum(self._accepted) / judged if judged else None

    def prefix(self) -> Floats | None:
        """P(first k drafts accepted) for every k, geometric where nothing is known."""
        rate = self.acceptance_rate
        if rate is None or not self._judged[0]:
            return None
        known = empirical_prefix(self._accepted, self._judged)
        beyond = geometric_prefix(rate, len(self._judged))[: len(self._judged) - known.size]
        return np.concatenate((known, known[-1] * beyond))


class NetworkState:
    """Whether the link is good (0) or bad (1) now, and whether telling them apart pays (§V-D)."""

    def __init__(self) -> None:
        self._rtts_ms: deque[float] = deque(maxlen=RTT_WINDOW)
        self._boundary_ms = 0.0
        self._seen = 0
        self.contextual = False

    def observe(self, rtt_ms: float, critical_rtt_ms: float | None) -> None:
        """A round trip; `critical_rtt_ms` is 2·d_c, if it is known."""
        self._rtts_ms.append(rtt_ms)
        self._seen += 1
        if self._seen % _REVIEW_EVERY:
            return
        low, high = np.quantile(self._rtts_ms, (0.1, 0.9)).tolist()
        self._boundary_ms = (low + high) / 2.0
        if critical_rtt_ms is not None:
            by_state: tuple[list[float], list[float]] = ([], [])
            for seen_ms in self._rtts_ms:
                by_state[seen_ms > self._boundary_ms].append(seen_ms)
            self.contextual = context_pays(by_state, critical_rtt_ms, self.contextual)

    @property
    def now(self) -> int:
        """The state that the last round trip was of."""
        return int(bool(self._rtts_ms) and self._rtts_ms[-1] > self._boundary_ms)


@dataclass(frozen=True, slots=True)
class Planned:
    """What a round was planned as: its draft length, and the network's state then."""

    draft_len: int
    network_state: int = 0


class BlindOrContextual:
    """UCB-SpecStop, blind until the delays vary so much that a bandit per state pays (§V-D).

    Several sessions have rounds under way at once: each keeps what its own was `Planned` as.
    """

    def __init__(self, draft_lens: Sequence[int]) -> None:
        self._blind = UcbSpecStop(draft_lens)
        self._by_state = ContextualUcb(draft_lens, num_states=2)
        self._network = NetworkState()

    def observe_rtt(self, rtt_ms: float, critical_rtt_ms: float | None) -> None:
        self._network.observe(rtt_ms, critical_rtt_ms)

    def select(self) -> Planned:
        """The next round of any session."""
        state = self._network.now
        if self._network.contextual:
            return Planned(self._by_state.select(state), state)
        return Planned(self._blind.select(), state)

    def update(self, planned: Planned, round_ms: float, committed: int) -> None:
        """Learn from one round; both forms do, so that either may go on from it."""
        self._blind.update(planned.draft_len, round_ms, committed)
        self._by_state.update(planned.network_state, planned.draft_len, round_ms, committed)

    def state(self) -> dict[str, object]:
        """What was learned, in plain JSON types."""
        return {"kind": "ucb", "blind": self._blind.state(), "by_state": self._by_state.state()}

    def restore(self, state: object) -> None:
        """Go on from a `state()`; ValueError if malformed or of other arms, and nothing changes."""
        saved_blind, saved_by_state = entries(state, "ucb", "blind", "by_state")
        arms = self._blind.draft_lens
        blind, by_state = UcbSpecStop(arms), ContextualUcb(arms, num_states=2)
        blind.restore(saved_blind)
        by_state.restore(saved_by_state)
        self._blind, self._by_state = blind, by_state


Bandit = UcbSpecStop | NaiveUcb | BlindOrContextual | Exp3


class RoundCosts:
    """What rounds of each draft length took, without the network's delay."""

    def __init__(self, max_draft_len: int) -> None:
        self._sums_ms = [0.0] * max_draft_len
        self._counts = [0] * max_draft_len

    def observe(self, ended: RoundEnded, answered: Answered) -> None:
        """A round, and the answer of its NAV, whose round trip is taken off."""
        if 1 <= ended.draft_len <= len(self._counts):
            self._sums_ms[ended.draft_len - 1] += ended.ms - (answered.ms - answered.verify_ms)
            self._counts[ended.draft_len - 1] += 1

    def calibrated(self, modelled_ms: Floats) -> Floats:
        """Measured means where there are enough rounds, else the model's."""
        measured = zip(self._sums_ms, self._counts, modelled_ms.tolist(), strict=True)
        return np.array(
            [
                max(sum_ms / count, 0.0) if count >= _KNOWN_ROUNDS else model_ms
                for sum_ms, count, model_ms in measured
            ]
        )


def oracle_draft_len(
    learner: str, counts: AcceptanceCounts, rounds: RoundCosts, environment: Environment
) -> int | None:
    """What a plug-in oracle would choose: B2 "greedy", B4 "theory", B5 "calibrated", B6 the rest.

    None before any draft was judged.
    """
    prefix, rate = counts.prefix(), counts.acceptance_rate
    if prefix is None or rate is None:
        return None
    one_way_ms = environment.link.rtt_ms / 2.0
    modelled_ms = modelled_round_ms(environment.costs, prefix.size)
    match learner:
        case "greedy":
            return greedy_draft_len(modelled_ms, prefix)
        case "theory":
            return theory_draft_len(environment.costs, rate, one_way_ms, prefix.size)
        case "calibrated":
            return calibrated_draft_len(rounds.calibrated(modelled_ms), rate, one_way_ms)
        case _:
            return optimal_draft_len(modelled_ms, prefix, one_way_ms)


def critical_rtt_ms(counts: AcceptanceCounts, environment: Environment | None) -> float | None:
    """2·d_c by what is known; None if that is too little, or nothing makes a longer draft pay."""
    prefix = counts.prefix()
    if prefix is None or environment is None:
        return None
    rtt_ms = 2.0 * critical_one_way_ms(modelled_round_ms(environment.costs, prefix.size), prefix)
    return rtt_ms if rtt_ms < float("inf") else None
