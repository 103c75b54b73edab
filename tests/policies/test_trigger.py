"""Triggers against their definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.calibration import AcceptanceCurve
from policies.trigger import (
    DraftSignal,
    DualThresholdTrigger,
    EntropyTrigger,
    FixedTrigger,
    PriceTrigger,
    SequenceTrigger,
    TokenTrigger,
    Trigger,
    adapted_threshold,
    drafts_until_decision,
    fires,
    wasted_ms,
)

drafts_seen = st.lists(
    st.builds(DraftSignal, st.floats(0, 1), st.floats(0, 12)), min_size=1, max_size=30
)
thresholds = st.floats(0, 1)
CURVE = AcceptanceCurve((0.2, 0.5, 0.9), (0.1, 0.6, 0.95))


@given(drafts_seen, thresholds, thresholds)
def test_dual_threshold_is_the_token_or_the_sequence_trigger(
    drafts: list[DraftSignal], sequence: float, token: float
) -> None:
    either = fires(TokenTrigger(token, 20), drafts) or fires(SequenceTrigger(sequence, 20), drafts)
    assert fires(DualThresholdTrigger(sequence, token, 20), drafts) == either


@given(drafts_seen, thresholds)
def test_token_trigger_looks_at_the_newest_draft_only(
    drafts: list[DraftSignal], token: float
) -> None:
    assert fires(TokenTrigger(token, 100), drafts) == (drafts[-1].confidence < token)


@given(drafts_seen, thresholds)
def test_sequence_trigger_looks_at_the_product(drafts: list[DraftSignal], threshold: float) -> None:
    product = math.prod(draft.confidence for draft in drafts)
    assert fires(SequenceTrigger(threshold, 100), drafts) == (product < threshold)


@pytest.mark.parametrize(
    "trigger",
    [
        FixedTrigger(5),
        TokenTrigger(0, 5),
        SequenceTrigger(0, 5),
        DualThresholdTrigger(0, 0, 5),
        EntropyTrigger(1, 5),
        PriceTrigger(1e9, 36, CURVE, 5),
    ],
)
def test_every_trigger_fires_at_its_longest_draft(trigger: Trigger) -> None:
    assert not fires(trigger, [DraftSignal(1.0)] * 4)
    assert fires(trigger, [DraftSignal(1.0)] * 5)
    assert not fires(trigger, [])


@given(st.integers(1, 20), st.integers(0, 40))
def test_a_fixed_trigger_knows_how_many_drafts_are_certain(length: int, drafted: int) -> None:
    certain = drafts_until_decision(FixedTrigger(length), drafted)
    assert certain == max(1, length - drafted)
    assert not any(
        fires(FixedTrigger(length), [DraftSignal(0.9)] * n)
        for n in range(drafted, drafted + certain)
        if n < length
    )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FixedTrigger(0), "draft_len"),
        (lambda: TokenTrigger(1.5, 4), "threshold"),
        (lambda: SequenceTrigger(float("nan"), 4), "threshold"),
        (lambda: DualThresholdTrigger(0.5, -0.1, 4), "token_threshold"),
        (lambda: DualThresholdTrigger(0.5, 0.5, 0), "max_draft_len"),
        (lambda: EntropyTrigger(-0.1, 4), "threshold"),
        (lambda: PriceTrigger(-1, 36, CURVE, 4), "nav_price_ms"),
        (lambda: PriceTrigger(30, math.inf, CURVE, 4), "draft_ms"),
        (lambda: adapted_threshold(2, 3, 1), "threshold"),
        (lambda: adapted_threshold(0.5, 3, 4), "num_accepted"),
    ],
)
def test_a_bad_parameter_is_named(make, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


@given(drafts_seen, thresholds)
def test_the_entropy_trigger_stops_once_a_rejection_is_likely_enough(
    drafts: list[DraftSignal], threshold: float
) -> None:
    all_stand = math.prod(math.exp(-draft.entropy) for draft in drafts)
    if abs(1.0 - all_stand - threshold) > 1e-9:
        assert fires(EntropyTrigger(threshold, 100), drafts) == (1.0 - all_stand > threshold)


@given(drafts_seen, st.floats(0, 500), st.floats(0, 100))
def test_the_price_trigger_pays_for_a_nav_with_what_drafting_in_vain_costs(
    drafts: list[DraftSignal], price_ms: float, draft_ms: float
) -> None:
    """Oracle: the expected number of drafts behind the first rejection, that one included."""
    acceptances = [CURVE.at(draft.confidence) for draft in drafts]
    in_vain = 0.0
    for first_rejected, acceptance in enumerate(acceptances):
        reached = math.prod(acceptances[:first_rejected])
        in_vain += reached * (1.0 - acceptance) * (len(drafts) - first_rejected)
    trigger = PriceTrigger(price_ms, draft_ms, CURVE, 100)
    assert wasted_ms(trigger, drafts) == pytest.approx(draft_ms * in_vain, abs=1e-6)
    if abs(draft_ms * in_vain - price_ms) > 1e-6:
        assert fires(trigger, drafts) == (draft_ms * in_vain >= price_ms)


def test_at_price_zero_every_draft_is_asked_for_and_a_dearer_nav_comes_later() -> None:
    drafts = [DraftSignal(0.9)] * 40
    waits = []
    for price_ms in (0.0, 10.0, 30.0, 100.0, 1_000.0):
        trigger = PriceTrigger(price_ms, 36.0, CURVE, 100)
        waits.append(next((n for n in range(1, 41) if fires(trigger, drafts[:n])), 41))
    assert waits[0] == 1
    assert waits == sorted(waits)
    assert len(set(waits)) > 3


def test_edgellms_threshold_falls_after_a_full_acceptance_and_rises_with_rejections() -> None:
    assert adapted_threshold(0.4, 5, 5) == 0.2
    assert adapted_threshold(0.4, 4, 2) == pytest.approx(0.4 * math.sqrt(2))
    assert adapted_threshold(0.4, 4, 0) == 0.8
    assert adapted_threshold(0.4, 0, 0) == 0.4
    rises = [adapted_threshold(0.4, 8, accepted) for accepted in range(8, -1, -1)]
    assert rises == sorted(rises)


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1)), max_size=60))
def test_edgellms_threshold_never_leaves_its_range(navs: list[tuple[int, float]]) -> None:
    threshold = 0.5
    for num_drafts, share in navs:
        threshold = adapted_threshold(threshold, num_drafts, round(share * num_drafts))
        assert 0.001 <= threshold <= 0.99
