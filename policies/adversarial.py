"""EXP3 over draft lengths: the baseline that supposes nothing about how costs arise (§VI-E).

Sections and symbols without a name are those of UCB-SpecStop (`specstop`, arXiv 2606.20591).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from policies.bandit import (
    Tally,
    check_draft_lens,
    clear_outliers,
    is_round,
    saved_tallies,
    total,
)
from policies.saved import entries, saved_count, saved_numbers

FULL_GAIN = 2.0  # so many standard deviations of a round's saving are a gain of 1
DISCOUNT = 0.99  # of earlier rounds in the average that a round is measured against


class Exp3:
    """EXP3 on the ratio objective, by what a round saves; with the fixed share of EXP3.S.

    A round's gain is the time by which it beat the average cost of late, λ · committed - round_ms
    with λ a ratio of sums, in units of two standard deviations and cut to [-1, 1]. What saves
    most at λ = C* is the arm of least cost (Dinkelbach, §IV-C). The part `exploration` (γ) of all
    rounds is spread evenly over the arms, so none is ever off; for the same reason the regret
    grows linearly. Drift: after each round the part `share` (EXP3.S's α) of the weight is handed
    out evenly, so an arm that was bad for long can rise again as soon as one that was bad briefly.

    Auer, Cesa-Bianchi, Freund and Schapire, The nonstochastic multiarmed bandit problem, 2002.
    """

    def __init__(
        self, draft_lens: Sequence[int], exploration: float = 0.1, share: float = 0.001
    ) -> None:
        if not 0.0 < exploration <= 1.0:
            raise ValueError(f"exploration must be in (0, 1], got {exploration}")
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be in (0, 1], got {share}")
        self.draft_lens = check_draft_lens(draft_lens)
        self.exploration = float(exploration)
        self.share = float(share)
        self.ignored = 0  # rounds that cannot have been: see `is_round`
        self._weights = [1.0 / len(self.draft_lens)] * len(self.draft_lens)  # of sum 1
        self._tallies = [Tally() for _ in self.draft_lens]

    def probabilities(self) -> list[float]:
        """How likely each arm is to be selected next, at least exploration / K."""
        floor = self.exploration / len(self._weights)
        return [(1.0 - self.exploration) * weight + floor for weight in self._weights]

    def select(self, rng: np.random.Generator) -> int:
        """A draft length drawn by `probabilities`, with one uniform number from `rng`."""
        left = rng.random()
        for draft_len, probability in zip(self.draft_lens, self.probabilities(), strict=True):
            left -= probability
            if left < 0.0:
                return draft_len
        return self.draft_lens[-1]  # the probabilities add to 1 but for rounding

    def update(self, draft_len: int, round_ms: float, committed: int) -> None:
        """Learn from the round selected last; one that `is_round` refuses counts in `ignored`."""
        if not is_round(self.draft_lens, draft_len, round_ms, committed):
            self.ignored += 1
            return
        arm = self.draft_lens.index(draft_len)
        gain = self._gain(arm, float(round_ms), float(committed))
        # divided by its probability a gain is unbiased; times γ/K the exponent stays within 1
        rate = self.exploration / len(self.draft_lens) / self.probabilities()[arm]
        weights = list(self._weights)
        weights[arm] *= math.exp(rate * gain)
        total, handed_out = sum(weights), self.share / len(weights)
        self._weights = [(1.0 - self.share) * weight / total + handed_out for weight in weights]

    def _gain(self, arm: int, round_ms: float, committed: float) -> float:
        longest_ms = (self.draft_lens[arm] + 1) * round_ms / committed
        clear_outliers(self._tallies[: arm + 1], longest_ms)
        average = total(self._tallies)
        expected_cost_ms = average.cost_ms if average.rounds else round_ms / committed
        for tally in self._tallies:
            tally.discount(DISCOUNT)
        self._tallies[arm].add(round_ms, committed, expected_cost_ms)
        average = total(self._tallies)
        full_ms = FULL_GAIN * math.sqrt(average.squared_ms / average.rounds)
        saved_ms = expected_cost_ms * committed - round_ms
        return max(-1.0, min(1.0, saved_ms / full_ms)) if full_ms else 0.0

    def state(self) -> dict[str, object]:
        """What was learned, in plain JSON types."""
        return {
            "kind": "exp3",
            "draft_lens": list(self.draft_lens),
            "weights": list(self._weights),
            "tallies": [list(astuple(tally)) for tally in self._tallies],
            "ignored": self.ignored,
        }

    def restore(self, state: object) -> None:
        """Go on from a `state()`; ValueError if malformed or of other arms, and nothing changes."""
        names = ("draft_lens", "weights", "tallies", "ignored")
        draft_lens, saved, tallies, ignored = entries(state, "exp3", *names)
        if draft_lens != list(self.draft_lens):
            raise ValueError(f"draft_lens must be {list(self.draft_lens)}, got {draft_lens!r:.200}")
        weights = saved_numbers("weights", saved, len(self.draft_lens))
        if min(weights) <= 0.0 or not math.isclose(sum(weights), 1.0):
            raise ValueError(f"weights must be positive and of sum 1, got {weights}")
        restored = saved_tallies(tallies, len(weights))
        self.ignored = saved_count("ignored", ignored)
        self._weights, self._tallies = weights, restored
