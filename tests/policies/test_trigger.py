"""Triggers against their definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.trigger import (
    DualThresholdTrigger,
    FixedTrigger,
    SequenceTrigger,
    TokenTrigger,
    drafts_until_decision,
    fires,
)

confidences = st.lists(st.floats(0, 1), min_size=1, max_size=30)
thresholds = st.floats(0, 1)


@given(confidences, thresholds, thresholds)
def test_dual_threshold_is_the_token_or_the_sequence_trigger(
    drafts: list[float], sequence: float, token: float
) -> None:
    either = fires(TokenTrigger(token, 20), drafts) or fires(SequenceTrigger(sequence, 20), drafts)
    assert fires(DualThresholdTrigger(sequence, token, 20), drafts) == either


@given(confidences, thresholds)
def test_token_trigger_looks_at_the_newest_draft_only(drafts: list[float], token: float) -> None:
    assert fires(TokenTrigger(token, 100), drafts) == (drafts[-1] < token)


@given(confidences, thresholds)
def test_sequence_trigger_looks_at_the_product(drafts: list[float], threshold: float) -> None:
    assert fires(SequenceTrigger(threshold, 100), drafts) == (math.prod(drafts) < threshold)


@pytest.mark.parametrize(
    "trigger",
    [FixedTrigger(5), TokenTrigger(0, 5), SequenceTrigger(0, 5), DualThresholdTrigger(0, 0, 5)],
)
def test_every_trigger_fires_at_its_longest_draft(trigger) -> None:
    assert not fires(trigger, [1.0] * 4)
    assert fires(trigger, [1.0] * 5)
    assert not fires(trigger, [])


@given(st.integers(1, 20), st.integers(0, 40))
def test_a_fixed_trigger_knows_how_many_drafts_are_certain(length: int, drafted: int) -> None:
    certain = drafts_until_decision(FixedTrigger(length), drafted)
    assert certain == max(1, length - drafted)
    assert not any(
        fires(FixedTrigger(length), [0.9] * n)
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
    ],
)
def test_a_bad_parameter_is_named(make, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
