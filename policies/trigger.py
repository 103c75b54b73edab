"""When to ask for verification: pure functions of the draft confidences since the last NAV.

The draft token that fires a trigger is included in the NAV. A confidence is the draft model's
softmax probability of its own token, in [0, 1]. At `max_draft_len` every trigger fires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def _check_length(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def _check_threshold(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


@dataclass(frozen=True, slots=True)
class FixedTrigger:
    """After every `draft_len` drafts: Vanilla speculative decoding with k = draft_len."""

    draft_len: int

    def __post_init__(self) -> None:
        _check_length("draft_len", self.draft_len)


@dataclass(frozen=True, slots=True)
class TokenTrigger:
    """When one draft's confidence falls below `threshold` (HSL)."""

    threshold: float
    max_draft_len: int

    def __post_init__(self) -> None:
        _check_threshold("threshold", self.threshold)
        _check_length("max_draft_len", self.max_draft_len)


@dataclass(frozen=True, slots=True)
class SequenceTrigger:
    """When the product of the confidences falls below `threshold` (EdgeLLM)."""

    threshold: float
    max_draft_len: int

    def __post_init__(self) -> None:
        _check_threshold("threshold", self.threshold)
        _check_length("max_draft_len", self.max_draft_len)


@dataclass(frozen=True, slots=True)
class DualThresholdTrigger:
    """PipeSD's NAV trigger: the product C_1 below R_1 or the token's P(D_n) below R_2 (§3.6)."""

    sequence_threshold: float
    token_threshold: float
    max_draft_len: int

    def __post_init__(self) -> None:
        _check_threshold("sequence_threshold", self.sequence_threshold)
        _check_threshold("token_threshold", self.token_threshold)
        _check_length("max_draft_len", self.max_draft_len)


Trigger = FixedTrigger | TokenTrigger | SequenceTrigger | DualThresholdTrigger


def max_draft_len(trigger: Trigger) -> int:
    """The most drafts that can pass before the trigger fires."""
    return trigger.draft_len if isinstance(trigger, FixedTrigger) else trigger.max_draft_len


def fires(trigger: Trigger, confidences: Sequence[float]) -> bool:
    """Whether the newest of `confidences`, those of the drafts since the last NAV, asks for one."""
    if not confidences:
        return False
    if len(confidences) >= max_draft_len(trigger):
        return True
    match trigger:
        case FixedTrigger():
            return False
        case TokenTrigger(threshold=threshold):
            return confidences[-1] < threshold
        case SequenceTrigger(threshold=threshold):
            return math.prod(confidences) < threshold
        case DualThresholdTrigger(sequence_threshold=sequence, token_threshold=token):
            return confidences[-1] < token or math.prod(confidences) < sequence


def drafts_until_decision(trigger: Trigger, num_drafts: int) -> int:
    """How many drafts after `num_drafts` are certain before the trigger can fire, at least 1."""
    if isinstance(trigger, FixedTrigger):
        return max(1, trigger.draft_len - num_drafts)
    return 1
