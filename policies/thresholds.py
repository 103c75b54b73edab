"""The two thresholds of PipeSD's trigger: settings, bounds, and searches that learn nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

DECIMALS = 3  # settings that are closer to each other trigger alike


class Setting(NamedTuple):
    """R_1 and R_2 of the dual-threshold trigger (§3.6)."""

    sequence_threshold: float
    token_threshold: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lowest and highest value of each threshold; where they are equal it is fixed.

    The default is the domain of §9.1. Raises ValueError unless 0 <= low <= high <= 1.
    """

    sequence_threshold: tuple[float, float] = (0.1, 0.95)
    token_threshold: tuple[float, float] = (0.1, 0.95)

    def __post_init__(self) -> None:
        for name in ("sequence_threshold", "token_threshold"):
            low, high = getattr(self, name)
            if not 0.0 <= low <= high <= 1.0:
                raise ValueError(f"{name} must have 0 <= low <= high <= 1, got {low} and {high}")

    @property
    def ranges(self) -> list[tuple[float, float]]:
        return [self.sequence_threshold, self.token_threshold]

    @property
    def free(self) -> list[int]:
        """The indices of the thresholds that are not fixed."""
        return [i for i, (low, high) in enumerate(self.ranges) if low < high]

    def contains(self, setting: Setting) -> bool:
        """Whether both thresholds lie within; never for NaN."""
        return all(low <= x <= high for x, (low, high) in zip(setting, self.ranges, strict=True))

    def clip(self, setting: Setting) -> Setting:
        """The nearest setting within, rounded to `DECIMALS` unless a bound is nearer."""
        pairs = zip(setting, self.ranges, strict=True)
        return Setting(
            *(float(min(max(round(x, DECIMALS), low), high)) for x, (low, high) in pairs)
        )


def grid(bounds: Bounds, budget: int) -> list[Setting]:
    """The centres of equal cells, as many as `budget` allows in rows of equal length."""
    check_budget(budget)
    rows = {(0, 1): math.isqrt(budget), (0,): budget}.get(tuple(bounds.free), 1)
    columns = budget // rows if 1 in bounds.free else 1
    centres = [
        [low + (high - low) * (i + 0.5) / count for i in range(count)]
        for count, (low, high) in zip((rows, columns), bounds.ranges, strict=True)
    ]
    return [bounds.clip(Setting(row, column)) for row in centres[0] for column in centres[1]]


def random_search(bounds: Bounds, budget: int, rng: np.random.Generator) -> list[Setting]:
    """`budget` settings, uniform within the bounds."""
    check_budget(budget)
    low, high = np.array(bounds.ranges).T
    return [bounds.clip(Setting(*drawn)) for drawn in rng.uniform(low, high, (budget, 2)).tolist()]


def check_budget(budget: int) -> None:
    """Raises ValueError unless there is something to try."""
    if budget < 1:
        raise ValueError(f"budget must be >= 1, got {budget}")
