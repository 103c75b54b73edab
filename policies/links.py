"""Links for the simulator: delay, bandwidth, jitter, loss, and how they change with time.

Two kinds of connection, as in PipeSD's model and not (§3.2; ARCHITECTURE.md, "Cost model"): one
that stays open is occupied by a message's overhead and bytes only, while delay pipelines; with one
request at a time the next message waits until the one before it has arrived.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


@dataclass(frozen=True, slots=True)
class Phase:
    """How a link is for `lasts_ms`. Jitter is exponential, with this mean, beyond the delay.

    While it is `down` nothing is sent; what was sent before arrives. Raises ValueError naming a
    field out of range.
    """

    one_way_ms: float = 25.0
    bytes_per_ms: float = math.inf
    jitter_ms: float = 0.0
    down: bool = False
    lasts_ms: float = math.inf

    def __post_init__(self) -> None:
        for name in ("one_way_ms", "jitter_ms"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)}")
        for name in ("bytes_per_ms", "lasts_ms"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction of a link: phases that follow each other, again and again.

    `overhead_ms` is each message's own. `in_order`: no message overtakes another, as on TCP;
    otherwise jitter reorders. `loss` and `duplication` are probabilities. Raises ValueError naming
    a field out of range.
    """

    phases: tuple[Phase, ...] = (Phase(),)
    overhead_ms: float = 0.0
    one_request_at_a_time: bool = False
    in_order: bool = True
    loss: float = 0.0
    duplication: float = 0.0

    def __post_init__(self) -> None:
        if not self.phases or all(phase.down for phase in self.phases):
            raise ValueError("phases must have one that is not down")
        if not 0.0 <= self.overhead_ms < math.inf:
            raise ValueError(f"overhead_ms must be finite and >= 0, got {self.overhead_ms}")
        for name in ("loss", "duplication"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    @property
    def period_ms(self) -> float:
        """After so long the phases begin again."""
        return sum(phase.lasts_ms for phase in self.phases)


class Direction:
    """One direction of a running link; messages are sent in the order of time."""

    def __init__(self, model: LinkModel, rng: np.random.Generator) -> None:
        self._model = model
        self._rng = rng
        self._ends_ms = list(accumulate(phase.lasts_ms for phase in model.phases))
        self._free_ms = 0.0
        self._last_arrival_ms = self._arrival_before_ms = 0.0
        self._began_ms = 0.0  # the last message
        self.sends = 0

    @property
    def free_ms(self) -> float:
        """When what was handed over has left."""
        return self._free_ms

    def phase(self, at_ms: float) -> tuple[Phase, float]:
        """The phase at that time, and when it ends."""
        period_ms = self._ends_ms[-1]
        turns = 0.0 if math.isinf(period_ms) else math.floor(at_ms / period_ms) * period_ms
        number = min(bisect_right(self._ends_ms, at_ms - turns), len(self._ends_ms) - 1)
        return self._model.phases[number], turns + self._ends_ms[number]

    def send(self, at_ms: float, num_bytes: float) -> list[float]:
        """When a message handed over at `at_ms` arrives: never, once or twice.

        It leaves when the one before it has left, at the rate of that moment.
        """
        model = self._model
        starts_ms = max(at_ms, self._free_ms)
        phase, ends_ms = self.phase(starts_ms)
        while phase.down:
            starts_ms = ends_ms
            phase, ends_ms = self.phase(starts_ms)
        self._began_ms = starts_ms
        self.sends += 1
        self._arrival_before_ms = self._last_arrival_ms
        left_ms = starts_ms + model.overhead_ms + num_bytes / phase.bytes_per_ms
        self._free_ms = left_ms
        if model.loss and self._rng.random() < model.loss:
            return []
        copies = 2 if model.duplication and self._rng.random() < model.duplication else 1
        arrivals = [left_ms + phase.one_way_ms + self._jitter_ms(phase) for _ in range(copies)]
        if model.one_request_at_a_time:
            self._free_ms = arrivals[0]
        if model.in_order:
            arrivals = [max(arrival, self._last_arrival_ms) for arrival in arrivals]
            self._last_arrival_ms = max(arrivals)
        return arrivals

    def break_off(self, at_ms: float) -> float:
        """Stop sending the last message, which then never arrives; the share that had left."""
        if at_ms >= self._free_ms:
            return 1.0
        share = (at_ms - self._began_ms) / (self._free_ms - self._began_ms)
        self._free_ms = max(at_ms, self._began_ms)
        self._last_arrival_ms = self._arrival_before_ms
        return max(0.0, share)

    def _jitter_ms(self, phase: Phase) -> float:
        return float(self._rng.exponential(phase.jitter_ms)) if phase.jitter_ms else 0.0


def markov_phases(
    states: Sequence[Phase], mean_stay_ms: float, total_ms: float, rng: np.random.Generator
) -> tuple[Phase, ...]:
    """A path of a chain that stays in each state for an exponential time, `total_ms` long.

    From a state it goes to any other with equal probability, and starts in the first.
    """
    if len(states) < 2:
        raise ValueError(f"states must be at least two, got {len(states)}")
    phases: list[Phase] = []
    state, at_ms = 0, 0.0
    while at_ms < total_ms:
        stay_ms = max(1.0, float(rng.exponential(mean_stay_ms)))
        of = states[state]
        phases.append(Phase(of.one_way_ms, of.bytes_per_ms, of.jitter_ms, of.down, stay_ms))
        at_ms += stay_ms
        state = (state + int(rng.integers(1, len(states)))) % len(states)
    return tuple(phases)
