"""How likely is a draft to be accepted, given the draft model's confidence in it?

Learned from the verdicts on drafts that were judged, one `Calibration` per model pair. Drafts after
a rejected one are never judged, and knowing of an acceptance only what its predecessors allow makes
no bias: the confidence is given the same prefix.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from policies.saved import entries, saved_count, saved_numbers

# finer towards 1, where nearly all drafts of a good pair lie
_EDGES = (
    *(i / 20.0 for i in range(1, 19)),
    *(1.0 - 0.1 * 2.0 ** (-i / 2.0) for i in range(1, 16)),
)
_NUM_BINS = len(_EDGES) + 1
_CENTRES = [(lower + upper) / 2.0 for lower, upper in pairwise((0.0, *_EDGES, 1.0))]
_PRIOR_WEIGHT = 1.0  # drafts that the prior counts for, per bin
_PRIOR = _PRIOR_WEIGHT * np.array([[1.0] * _NUM_BINS, _CENTRES, _CENTRES])  # of the three sums
_HALF_LIFE = 20_000.0  # drafts after which an observation counts for half, so that it can drift
_REFIT_EVERY = 16  # observations between two fits
_LEAST, _MOST = 0.005, 0.9995  # no draft is certain to fall or to stand


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """P(accepted | confidence): linear between the knots, level beyond them, never decreasing.

    Raises ValueError unless there is a knot and both sequences are of one length, the confidences
    strictly increasing and the acceptances in [0, 1] and never decreasing.
    """

    confidences: tuple[float, ...]
    acceptances: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.confidences or len(self.confidences) != len(self.acceptances):
            raise ValueError(
                f"confidences and acceptances must have one length >= 1, got "
                f"{len(self.confidences)} and {len(self.acceptances)}"
            )
        if not all(lower < upper for lower, upper in pairwise(self.confidences)):
            raise ValueError(f"confidences must increase strictly, got {self.confidences}")
        bounded = (0.0, *self.acceptances, 1.0)
        if not all(lower <= upper for lower, upper in pairwise(bounded)):
            raise ValueError(
                f"acceptances must never decrease and be in [0, 1], got {self.acceptances}"
            )

    def at(self, confidence: float) -> float:
        """The probability that a draft of this confidence is accepted."""
        xs, ys = self.confidences, self.acceptances
        right = bisect_right(xs, confidence)
        if right == 0:
            return ys[0]
        if right == len(xs):
            return ys[-1]
        share = (confidence - xs[right - 1]) / (xs[right] - xs[right - 1])
        return ys[right - 1] + share * (ys[right] - ys[right - 1])


class Calibration:
    """Isotonic regression of acceptance on confidence, online.

    Observations are counted in bins of confidence; each bin begins with a prior of as many accepted
    as its confidence says, which a few dozen observations outweigh. Old ones fade.
    """

    def __init__(self) -> None:
        self._judged = [_PRIOR_WEIGHT] * _NUM_BINS
        self._accepted = [_PRIOR_WEIGHT * centre for centre in _CENTRES]
        self._confidence = [_PRIOR_WEIGHT * centre for centre in _CENTRES]  # sums, as the others
        self.observations = 0
        self.ignored = 0  # confidences outside [0, 1]
        self.curve = self._fitted()

    def observe(self, confidence: float, accepted: bool) -> None:
        """Count one judged draft. A confidence that is no probability is ignored and counted."""
        if not 0.0 <= confidence <= 1.0:
            self.ignored += 1
            return
        at = bisect_right(_EDGES, confidence)
        self._judged[at] += 1.0
        self._accepted[at] += accepted
        self._confidence[at] += confidence
        self.observations += 1
        if self.observations % _REFIT_EVERY == 0:
            self._fade()
            self.curve = self._fitted()

    def _fade(self) -> None:
        """Weigh what was observed, not the prior, a little less."""
        keep = math.exp2(-_REFIT_EVERY / _HALF_LIFE)
        sums = np.array((self._judged, self._accepted, self._confidence))
        self._judged, self._accepted, self._confidence = (_PRIOR + keep * (sums - _PRIOR)).tolist()

    def _fitted(self) -> AcceptanceCurve:
        judged = np.array(self._judged)
        fit = isotonic_regression(np.array(self._accepted) / judged, weights=judged)
        confidences = (np.array(self._confidence) / judged).tolist()
        return AcceptanceCurve(tuple(confidences), tuple(np.clip(fit.x, _LEAST, _MOST).tolist()))

    def state(self) -> dict[str, Any]:
        """Everything learned, as plain JSON types."""
        return {
            "kind": "calibration",
            "judged": list(self._judged),
            "accepted": list(self._accepted),
            "confidence": list(self._confidence),
            "curve": [list(self.curve.confidences), list(self.curve.acceptances)],
            "observations": self.observations,
            "ignored": self.ignored,
        }

    @classmethod
    def restored(cls, state: object) -> Calibration:
        """The calibration that saved this state. Raises ValueError if it is not such a state."""
        names = ("judged", "accepted", "confidence", "curve", "observations", "ignored")
        judged, accepted, confidence, curve, observations, ignored = entries(
            state, "calibration", *names
        )
        calibration = cls()
        calibration.observations = saved_count("observations", observations)
        calibration.ignored = saved_count("ignored", ignored)
        calibration._judged = _saved_sums("judged", judged, [1e12] * _NUM_BINS)
        if min(calibration._judged) < 0.99 * _PRIOR_WEIGHT:
            raise ValueError(f"judged must be at least the prior's {_PRIOR_WEIGHT} in every bin")
        calibration._accepted = _saved_sums("accepted", accepted, calibration._judged)
        calibration._confidence = _saved_sums("confidence", confidence, calibration._judged)
        if not isinstance(curve, list) or len(curve) != 2:
            raise ValueError("curve must be two lists of numbers")
        xs, ys = (_saved_sums("curve", knots, [1.0] * _NUM_BINS) for knots in curve)
        calibration.curve = AcceptanceCurve(tuple(xs), tuple(ys))
        return calibration


def _saved_sums(name: str, values: object, most: list[float]) -> list[float]:
    numbers = saved_numbers(name, values, _NUM_BINS)
    for value, limit in zip(numbers, most, strict=True):
        if not 0.0 <= value <= limit * (1.0 + 1e-9):
            raise ValueError(f"{name} must be numbers in [0, {limit:g}], got {value!r}")
    return numbers
