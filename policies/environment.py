"""What drafting, the link and the verifier take, estimated from measurements, and when it changed.

What can be known with the edge's clock alone:

- A round trip without the verifier's time takes rtt + overhead + bytes · ms_per_byte. Over messages
  of several sizes its slope is `ms_per_byte` and its intercept is rtt + overhead: one message after
  the other never tells these two apart, nor the way there from the way back.
- Sending occupies the link for overhead + bytes · ms_per_byte. Where the edge can time that, its
  line is `overhead_ms` and `ms_per_byte`, and what a round trip takes beyond it, at the median, is
  `rtt_ms`: a wait for earlier messages is in the round trips only. Where it cannot, `overhead_ms`
  is 0 and `rtt_ms` holds both. Where each request waits until the one before it has arrived, the
  way there occupies the link too and is part of `overhead_ms`.
- Messages of one size have no slope: `ms_per_byte` is 0 and `rtt_ms` holds the bytes' time too.

What a change is good for is the reader's affair: here the past is forgotten and the change counted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from policies.costs import Costs, LinkCosts

Array = NDArray[np.float64]

DRAFT_WINDOW = 200  # draft tokens; PipeSD finds γ constant over as many (§3)
MESSAGE_WINDOW = 64  # messages or forwards; a fit takes the square of it
ENOUGH = 8  # measurements of a kind before it is estimated, and what a change leaves of them
MAX_MS = 3_600_000.0  # a longer time is no measurement but a machine that slept
MAX_SIZE = 10**12  # bytes or ids
MIN_SLOPE_SIGMAS = 2.0  # 1 in 44 passes by chance
RECENT = 10  # measurements that are held against the earlier ones, to see a change
MIN_CHANGE_SIGMAS = 3.25  # of the rank statistic below; no normal law is assumed of the times
MIN_CHANGE = 1.15  # a plan hardly differs for less
RESOLUTION_MS = 0.01  # what is shorter counts as about this long


@dataclass(frozen=True, slots=True)
class Line:
    """intercept_ms + slope_ms · size, and the share of the times' variance that it explains.

    R² = 1 - Σ(residual²) / Σ(deviation from the mean²) over all points, outliers included, so that
    of a line which rightly passes an outlier by may be negative. It is 0 where the slope is 0.
    """

    intercept_ms: float
    slope_ms: float
    r2: float


def robust_line(sizes: Array, times_ms: Array) -> Line:
    """The Theil-Sen line: the median slope of all pairs, then the median intercept, both >= 0.

    It stands as long as fewer than 29 % of the points are outliers. A slope that is negative, or
    that Kendall's rank test cannot tell from chance, is 0: jitter over messages of nearly one size
    has steep slopes, and a slope is there to be extrapolated. The intercept is then the median
    time. Whole sizes and finite times, both [n] with n >= 1; O(n²).
    """
    slope_ms = _median_slope(sizes, times_ms)
    if slope_ms == 0.0:
        return Line(max(0.0, _median(times_ms)), 0.0, 0.0)
    residuals = times_ms - slope_ms * sizes
    intercept_ms = max(0.0, _median(residuals))
    variation = float(np.square(times_ms - times_ms.mean()).sum())
    if variation == 0.0:
        return Line(intercept_ms, slope_ms, 0.0)
    unexplained = float(np.square(residuals - intercept_ms).sum())
    return Line(intercept_ms, slope_ms, 1.0 - unexplained / variation)


def _median_slope(sizes: Array, times_ms: Array) -> float:
    if sizes.min() == sizes.max():
        return 0.0
    order = np.argsort(sizes)
    sizes, times_ms = sizes[order], times_ms[order]
    smaller, larger = _pairs(sizes.size)
    runs = sizes[larger] - sizes[smaller]
    differ = runs > 0.0
    slopes_ms = (times_ms[larger] - times_ms[smaller])[differ] / runs[differ]
    concordance = float(np.sign(slopes_ms).sum())
    if concordance < MIN_SLOPE_SIGMAS * _chance_concordance(sizes):
        return 0.0
    return max(0.0, _median(slopes_ms))


def _median(values: Array) -> float:
    """Of at least one finite value; a fifth of the time that `np.median` takes for a few dozen."""
    half = values.size // 2
    if values.size % 2:
        return float(np.partition(values, half)[half])
    middle = np.partition(values, (half - 1, half))
    return float(middle[half - 1] + middle[half]) / 2.0


@lru_cache(maxsize=MESSAGE_WINDOW)
def _pairs(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Every pair of `count` indices once, the lower ones first."""
    lower, higher = np.triu_indices(count, 1)
    return lower, higher


def _chance_concordance(sizes: Array) -> float:
    """The standard deviation of Kendall's S, concordant less discordant pairs, without a slope."""
    tied = Counter(sizes.tolist()).values()
    terms = [count * (count - 1) * (2 * count + 5) for count in (sizes.size, *tied)]
    return math.sqrt((terms[0] - sum(terms[1:])) / 18)


class _Series:
    """The newest measurements of one kind since it last changed, and their line."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._room: Array = np.empty((2, 2 * window))  # sizes, times_ms; the points are part of it
        self._first = self._end = 0  # of the points
        self._line: Line | None = None  # of all points, unless newer ones came
        self._expected: Line | None = None  # of the earlier points, when last fitted
        self._known_sizes: Array = np.zeros(2)  # the range that two of these reach
        self._until_fit = RECENT + ENOUGH
        self.changes = 0
        self.rejected = 0

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def _points(self) -> Array:
        return self._room[:, self._first : self._end]

    def line(self) -> Line:
        """The line of all points, of which there must be one."""
        if self._line is None:
            self._line = robust_line(*self._points)
        return self._line

    def median_beyond(self, line: Line) -> float:
        """What the points, of which there must be one, take beyond a line of others; < 0: less."""
        sizes, times_ms = self._points
        return _median(times_ms - line.intercept_ms - line.slope_ms * sizes)

    def add(self, size: int, time_ms: float) -> None:
        """Take one measurement in, unless its time cannot be one; forget the past if it changed."""
        if not 0.0 <= time_ms <= MAX_MS:
            self.rejected += 1
            return
        self._append(size, time_ms)
        self._line = None
        self._until_fit -= 1
        if self._until_fit == 0:
            self._expected = robust_line(*self._points[:, :-RECENT])
            self._known_sizes = np.sort(self._points[0, :-RECENT])[[1, -2]]
            self._until_fit = RECENT
        # an ordinary time saves looking further: had there been a change, the next would show it
        if self._expected is None or _is_ordinary(self._expected, size, time_ms):
            return
        if self._has_changed(self._expected):
            self._first = self._end - ENOUGH
            self._expected = None
            self._until_fit = RECENT
            self.changes += 1

    def _append(self, size: int, time_ms: float) -> None:
        if self._end == 2 * self._window:  # so that points are moved once in a window only
            kept = self._points[:, 1 - self._window :]
            self._first, self._end = 0, kept.shape[1]
            self._room[:, : self._end] = kept
        self._room[0, self._end] = size
        self._room[1, self._end] = time_ms
        self._end += 1
        self._first = max(self._first, self._end - self._window)

    def _has_changed(self, expected: Line) -> bool:
        sizes, times_ms = self._points
        expected_ms = expected.intercept_ms + expected.slope_ms * sizes
        ratios = (times_ms + RESOLUTION_MS) / (expected_ms + RESOLUTION_MS)
        # a line knows nothing of other sizes; within MIN_CHANGE of its own it is off by less
        smallest, largest = self._known_sizes
        sizes = sizes[-RECENT:]
        known = (sizes >= smallest / MIN_CHANGE) & (sizes <= largest * MIN_CHANGE)
        # what a byte takes shows in large messages only, hence also by weight of size
        return any(
            weights.any() and _is_beyond(ratios[-RECENT:], ratios[:-RECENT], weights)
            for weights in (known.astype(float), known * sizes)
        )


def _is_ordinary(expected: Line, size: int, time_ms: float) -> bool:
    expected_ms = expected.intercept_ms + expected.slope_ms * size
    return 1.0 / MIN_CHANGE < (time_ms + RESOLUTION_MS) / (expected_ms + RESOLUTION_MS) < MIN_CHANGE


def _is_beyond(recent: Array, earlier: Array, weights: Array) -> bool:
    """Whether `recent` has gone up or down by more than MIN_CHANGE from `earlier`, by ranks.

    The statistic is the weighted share of pairs of a recent and an earlier value in which the
    recent one is higher, less the share in which it is lower (Cliff's delta; Mann and Whitney's U).
    Without a change its variance is (Σ weight² · (n + 1) + 1) / 3n for n earlier values and weights
    of sum 1, whatever law the values follow.
    """
    weights = weights / weights.sum()
    num_earlier = earlier.size
    variance = (float(weights @ weights) * (num_earlier + 1) + 1) / (3 * num_earlier)
    limit = MIN_CHANGE_SIGMAS * math.sqrt(variance)
    higher = weights @ np.sign(np.subtract.outer(recent / MIN_CHANGE, earlier))
    lower = weights @ np.sign(np.subtract.outer(recent * MIN_CHANGE, earlier))
    return bool(higher.sum() > limit * num_earlier or lower.sum() < -limit * num_earlier)


@dataclass(frozen=True, slots=True)
class Environment:
    """The estimates, how well lines describe the measurements, and how many these were."""

    costs: Costs
    link: LinkCosts
    verify_r2: float
    round_trip_r2: float
    send_r2: float  # 0 without sends
    num_drafts: int
    num_verifies: int
    num_round_trips: int
    num_sends: int


class EnvironmentMonitor:
    """Costs of one edge node and its verifier, over the newest measurements since they changed.

    Times are milliseconds. One that is NaN, infinite, negative (clocks do that) or over MAX_MS is
    counted in `rejected` and otherwise ignored. A size out of range raises ValueError: the caller
    knows how much it sent.

    A change is a kind of measurement that moved by more than MIN_CHANGE, up or down, over RECENT
    of them. With ENOUGH earlier ones and jitter well below it, a step is seen by its tenth
    measurement, and ENOUGH of these stay. Not seen are steps that move the times by less: of what a
    byte takes, where bytes are a small part of the round trip. Messages of sizes that are new are
    left out. Independent jitter, however wide, passes for a change less than once in 5,000
    measurements; jitter that comes in spells may be one.
    """

    def __init__(self) -> None:
        self._drafts = _Series(DRAFT_WINDOW)
        self._verifies = _Series(MESSAGE_WINDOW)
        self._round_trips = _Series(MESSAGE_WINDOW)
        self._sends = _Series(MESSAGE_WINDOW)

    @property
    def changes(self) -> int:
        """How often a kind of measurement changed; one cause that two kinds show counts twice."""
        return sum(series.changes for series in self._all())

    @property
    def rejected(self) -> int:
        """How many times were no measurements."""
        return sum(series.rejected for series in self._all())

    def observe_draft(self, ms: float) -> None:
        """One draft token took `ms`."""
        self._drafts.add(0, ms)

    def observe_verify(self, num_ids: int, ms: float) -> None:
        """One forward over `num_ids` took `ms` on the verifier's clock, as the verdict says."""
        self._verifies.add(_checked_size("num_ids", num_ids), ms)

    def observe_round_trip(self, num_bytes: int, ms: float) -> None:
        """A message's verdict came after `ms`, the verifier's own time taken off."""
        self._round_trips.add(_checked_size("num_bytes", num_bytes), ms)

    def observe_send(self, num_bytes: int, ms: float) -> None:
        """Sending a message kept the link from the next one for `ms`."""
        self._sends.add(_checked_size("num_bytes", num_bytes), ms)

    def snapshot(self) -> Environment | None:
        """The environment now; None before ENOUGH drafts, forwards and round trips.

        Fewer sends than ENOUGH count as none. The median draft token stands for all: rare long
        ones, which a machine that does other work has, are not in it. Lines are fitted here, and
        only those of measurements that are new since the last call.
        """
        if min(len(self._drafts), len(self._verifies), len(self._round_trips)) < ENOUGH:
            return None
        verify, round_trip = self._verifies.line(), self._round_trips.line()
        send = self._sends.line() if len(self._sends) >= ENOUGH else None
        link = LinkCosts(round_trip.intercept_ms, 0.0, round_trip.slope_ms)
        if send is not None:
            rtt_ms = max(0.0, self._round_trips.median_beyond(send))
            link = LinkCosts(rtt_ms, send.intercept_ms, send.slope_ms)
        return Environment(
            Costs(self._drafts.line().intercept_ms, verify.intercept_ms, verify.slope_ms),
            link,
            verify.r2,
            round_trip.r2,
            0.0 if send is None else send.r2,
            *(len(series) for series in self._all()),
        )

    def _all(self) -> tuple[_Series, _Series, _Series, _Series]:
        return self._drafts, self._verifies, self._round_trips, self._sends


def _checked_size(name: str, value: int) -> int:
    if not 0 <= value <= MAX_SIZE:
        raise ValueError(f"{name} must be in [0, {MAX_SIZE}], got {value}")
    return value
