"""A simulated edge and cloud for the bandits: rounds of drafts that are accepted independently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np


class Learner(Protocol):
    def select(self) -> int: ...
    def update(self, draft_len: int, round_ms: float, committed: int) -> None: ...


@dataclass(frozen=True, slots=True)
class World:
    """One NAV at a time: drafts, a delay each way that varies by `jitter` of itself, the verifier.

    Each draft is accepted with `acceptance_rate` as long as those before it were.
    """

    acceptance_rate: float
    draft_ms: float
    verify_ms: float
    rtt_ms: float
    jitter: float = 0.1

    def cost_ms(self, draft_len: int) -> float:
        """Expected milliseconds / expected committed tokens."""
        expected_committed = sum(self.acceptance_rate**i for i in range(draft_len + 1))
        return (draft_len * self.draft_ms + self.verify_ms + self.rtt_ms) / expected_committed

    def best(self, draft_lens: Sequence[int]) -> int:
        return min(draft_lens, key=self.cost_ms)

    def round(self, draft_len: int, rng: np.random.Generator) -> tuple[float, int]:
        """What one round lasted and committed."""
        accepted = 0
        if self.acceptance_rate > 0.0:
            run = math.log(1.0 - rng.random()) / math.log(self.acceptance_rate)
            accepted = min(draft_len, int(run))
        rtt_ms = self.rtt_ms * max(0.0, 1.0 + self.jitter * rng.standard_normal())
        return draft_len * self.draft_ms + self.verify_ms + rtt_ms, accepted + 1


class Network(Protocol):
    def round(self, draft_len: int, rng: np.random.Generator) -> tuple[float, int]: ...


def play(learner: Learner, world: Network, rounds: int, rng: np.random.Generator) -> list[int]:
    """The draft lengths that the learner chose."""
    chosen = []
    for _ in range(rounds):
        chosen.append(learner.select())
        learner.update(chosen[-1], *world.round(chosen[-1], rng))
    return chosen


def regret_ms(chosen: Sequence[int], world: World, draft_lens: Sequence[int]) -> float:
    """Pseudo-regret: what the chosen arms cost in expectation beyond the best one."""
    cost_ms = {draft_len: world.cost_ms(draft_len) for draft_len in draft_lens}
    return sum(cost_ms[draft_len] for draft_len in chosen) - len(chosen) * min(cost_ms.values())


def share_near(chosen: Sequence[int], draft_len: int) -> float:
    """Share of the choices within 1 of `draft_len`."""
    return sum(abs(choice - draft_len) <= 1 for choice in chosen) / len(chosen)


def most_switches(chosen: Sequence[int], rounds: int = 100) -> int:
    """The most changes of draft length within any so many consecutive rounds."""
    changed = [before != after for before, after in pairwise(chosen)]
    return max(sum(changed[i : i + rounds]) for i in range(max(1, len(changed) - rounds + 1)))
