"""The near-tie rule over HTTP: what a speculative request emitted against the target alone.

Every token is compared given the ids that were really emitted before it. Forwards of different
shapes differ in the last bits, so a token may differ from the target's own without a fault: it is a
near tie if the target holds it less than `EPSILON` behind its best. Anything else is a mismatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

EPSILON = 1.0  # logits; the difference of two log-probabilities is that of their logits


class Target(Protocol):
    """The target alone, greedy."""

    def target_ids(self, prompt_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """What it writes after these ids."""
        ...

    def target_top(self, prompt_ids: Sequence[int]) -> dict[int, float]:
        """Its most probable next ids, with their log-probabilities."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many emitted tokens are the target's own, and how the others differ."""

    identical: int = 0
    near_ties: int = 0
    mismatches: int = 0

    @property
    def compared(self) -> int:
        return self.identical + self.near_ties + self.mismatches

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.identical + other.identical,
            self.near_ties + other.near_ties,
            self.mismatches + other.mismatches,
        )


def compare(
    target: Target, prompt_ids: Sequence[int], emitted: Sequence[int], alone: Sequence[int]
) -> Comparison:
    """Judge every emitted id; `alone` is what the target wrote after the same prompt.

    After a difference the target is asked again, from the id that was emitted there.
    """
    before, rest, result = list(prompt_ids), list(emitted), Comparison()
    while True:
        pairs = zip(rest, alone, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        before, rest = before + rest[:same], rest[same:]
        result += Comparison(identical=same)
        if not rest:
            return result
        if is_near_tie(target.target_top(before), rest[0]):
            result += Comparison(near_ties=1)
        else:
            result += Comparison(mismatches=1)
        before, rest = before + rest[:1], rest[1:]
        if rest:
            alone = target.target_ids(before, len(rest))


def is_near_tie(top: dict[int, float], emitted: int) -> bool:
    """Whether the target holds the emitted id less than EPSILON behind its best."""
    return emitted in top and max(top.values()) - top[emitted] < EPSILON
