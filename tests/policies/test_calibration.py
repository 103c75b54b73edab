"""Confidence to acceptance: isotonic, online, bounded, and saved exactly."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.calibration import AcceptanceCurve, Calibration

confidences = st.floats(0, 1)


def calibrated(count: int, acceptance: float | None = None, seed: int = 0) -> Calibration:
    """After `count` drafts, accepted with that probability; None: with confidence^0.3."""
    rng = np.random.default_rng(seed)
    calibration = Calibration()
    for confidence, luck in zip(1.0 - rng.random(count) ** 3, rng.random(count), strict=True):
        likely = float(confidence) ** 0.3 if acceptance is None else acceptance
        calibration.observe(float(confidence), bool(luck < likely))
    return calibration


@given(st.lists(st.tuples(confidences, st.booleans()), max_size=200), confidences, confidences)
def test_a_higher_confidence_is_never_less_likely_accepted(
    judged: list[tuple[float, bool]], one: float, other: float
) -> None:
    calibration = Calibration()
    for confidence, accepted in judged:
        calibration.observe(confidence, accepted)
    low, high = sorted((one, other))
    assert 0.0 < calibration.curve.at(low) <= calibration.curve.at(high) < 1.0


def test_the_true_curve_is_found() -> None:
    """Within 4 standard errors and what a bin blurs: false alarm under 10⁻³ for nine points."""
    calibration = calibrated(20_000)
    for confidence in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99):
        assert calibration.curve.at(confidence) == pytest.approx(confidence**0.3, abs=0.04)


def test_before_any_verdict_a_draft_is_trusted_as_it_trusts_itself() -> None:
    curve = Calibration().curve
    for confidence in (0.1, 0.33, 0.5, 0.81, 0.97):
        assert curve.at(confidence) == pytest.approx(confidence, abs=0.005)


def test_a_few_dozen_verdicts_outweigh_the_prior() -> None:
    calibration = Calibration()
    for _ in range(48):
        calibration.observe(0.97, False)
    assert calibration.curve.at(0.97) < 0.2
    assert calibration.curve.at(0.2) < 0.2  # nothing below can be better


def test_a_change_of_models_is_followed() -> None:
    """Three half-lives of 20,000 drafts leave an eighth of what was before, over all bins."""
    calibration = calibrated(20_000, acceptance=1.0)
    for _ in range(60_000):
        calibration.observe(0.97, False)
    assert calibration.curve.at(0.97) < 0.1


@pytest.mark.parametrize("confidence", [math.nan, math.inf, -0.01, 1.01])
def test_what_is_no_probability_is_ignored_and_counted(confidence: float) -> None:
    calibration = Calibration()
    before = calibration.curve
    for _ in range(40):
        calibration.observe(confidence, True)
    assert (calibration.ignored, calibration.observations) == (40, 0)
    assert calibration.curve == before


@settings(max_examples=30)
@given(st.integers(0, 200), st.integers(1, 100))
def test_saved_and_restored_it_goes_on_bit_for_bit(before: int, after: int) -> None:
    calibration = calibrated(before)
    restored = Calibration.restored(json.loads(json.dumps(calibration.state(), allow_nan=False)))
    assert vars(restored) == vars(calibration)
    for i in range(after):
        for one in (calibration, restored):
            one.observe(i / after, i % 3 == 0)
    assert restored.state() == calibration.state()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "bandit"}, "kind"),
        ({"observations": -1}, "observations"),
        ({"observations": 1.5}, "observations"),
        ({"ignored": None}, "ignored"),
        ({"judged": []}, "judged"),
        ({"judged": [0.0] * 34}, "judged"),
        ({"accepted": [1e9] * 34}, "accepted"),
        ({"accepted": ["x"] * 34}, "accepted"),
        ({"confidence": None}, "confidence"),
        ({"curve": [[0.5]]}, "curve"),
        ({"curve": [[0.5] * 34, [0.5] * 34]}, "confidences"),
    ],
)
def test_a_state_that_is_none_is_refused_naming_the_entry(change: dict, named: str) -> None:
    state = copy.deepcopy(calibrated(40).state())
    assert len(state["judged"]) == 34
    with pytest.raises(ValueError, match=named):
        Calibration.restored(state | change)


@given(st.lists(confidences, min_size=1, max_size=8, unique=True), confidences)
def test_a_curve_is_linear_between_its_knots_and_level_beyond(
    knots: list[float], confidence: float
) -> None:
    xs = sorted(knots)
    ys = sorted(knot / 2.0 for knot in knots)
    expected = float(np.interp(confidence, xs, ys))
    assert AcceptanceCurve(tuple(xs), tuple(ys)).at(confidence) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("xs", "ys", "named"),
    [
        ((), (), "length"),
        ((0.1,), (), "length"),
        ((0.2, 0.1), (0.5, 0.5), "increase"),
        ((0.1, 0.2), (0.5, 0.4), "decrease"),
        ((0.1, 0.2), (0.5, 1.1), "acceptances"),
        ((0.1,), (math.nan,), "acceptances"),
    ],
)
def test_a_curve_that_is_none_is_refused(xs: tuple, ys: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AcceptanceCurve(xs, ys)
