"""When to ask for verification: pure functions of the drafts since the last NAV.

The draft token that fires a trigger is included in the NAV. At `max_draft_len` every trigger fires.
Everything is recomputed from the drafts, at most `max_draft_len` of them: some microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.calibration import AcceptanceCurve


@dataclass(frozen=True, slots=True)
class DraftSignal:
    """What the draft model tells of one draft token, by its softmax at temperature 1.

    `confidence`: its probability of the token, in [0, 1]. `entropy`: of the whole distribution, in
    nats, >= 0.
    """

    confidence: float
    entropy: float = 0.0


def _check_length(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def _check_ms(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")


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
        _check_share("threshold", self.threshold)
        _check_length("max_draft_len", self.max_draft_len)


@dataclass(frozen=True, slots=True)
class SequenceTrigger:
    """When the product of the confidences falls below `threshold` (EdgeLLM)."""

    threshold: float
    max_draft_len: int

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)
        _check_length("max_draft_len", self.max_draft_len)


@dataclass(frozen=True, slots=True)
class DualThresholdTrigger:
    """PipeSD's NAV trigger: the product C_1 below R_1 or the token's P(D_n) below R_2 (§3.6)."""

    sequence_threshold: float
    token_threshold: float
    max_draft_len: int

    def __post_init__(self) -> None:
        _check_share("sequence_threshold", self.sequence_threshold)
        _check_share("token_threshold", self.token_threshold)
        _check_length("max_draft_len", self.max_draft_len)


@dataclass(frozen=True, slots=True)
class EntropyTrigger:
    """When some draft since the last NAV is rejected with probability over `threshold`.

    The rule of SpecDec++ (Huang et al. 2024), whose trained head for the acceptance of a draft is
    replaced by exp(-entropy): sure for a peaked distribution, unlikely for a flat one.
    """

    threshold: float
    max_draft_len: int

    def __post_init__(self) -> None:
        _check_share("threshold", self.threshold)
        _check_length("max_draft_len", self.max_draft_len)


@dataclass(frozen=True, slots=True)
class PriceTrigger:
    """Once the drafting that is likely in vain has cost more than a NAV.

    Ours. With a_j the calibrated acceptance of the j-th draft since the last NAV and S_j = a_1⋯a_j,
    the j-th draft step is in vain with probability 1 - S_j; a NAV is due once
    Σ_j draft_ms · (1 - S_j) >= nav_price_ms. The price says what a forward of the target is worth
    in the edge's time: 0 asks after every draft.
    """

    nav_price_ms: float
    draft_ms: float
    curve: AcceptanceCurve
    max_draft_len: int

    def __post_init__(self) -> None:
        _check_ms("nav_price_ms", self.nav_price_ms)
        _check_ms("draft_ms", self.draft_ms)
        _check_length("max_draft_len", self.max_draft_len)


Trigger = (
    FixedTrigger
    | TokenTrigger
    | SequenceTrigger
    | DualThresholdTrigger
    | EntropyTrigger
    | PriceTrigger
)


def max_draft_len(trigger: Trigger) -> int:
    """The most drafts that can pass before the trigger fires."""
    return trigger.draft_len if isinstance(trigger, FixedTrigger) else trigger.max_draft_len


def fires(trigger: Trigger, drafts: Sequence[DraftSignal]) -> bool:
    """Whether the newest of `drafts`, those since the last NAV, asks for one."""
    if not drafts:
        return False
    if len(drafts) >= max_draft_len(trigger):
        return True
    match trigger:
        case FixedTrigger():
            return False
        case TokenTrigger(threshold=threshold):
            return drafts[-1].confidence < threshold
        case SequenceTrigger(threshold=threshold):
            return _standing(drafts) < threshold
        case DualThresholdTrigger(sequence_threshold=sequence, token_threshold=token):
            return drafts[-1].confidence < token or _standing(drafts) < sequence
        case EntropyTrigger(threshold=threshold):
            return 1.0 - math.exp(-sum(draft.entropy for draft in drafts)) > threshold
        case PriceTrigger(nav_price_ms=price_ms):
            return wasted_ms(trigger, drafts) >= price_ms


def wasted_ms(trigger: PriceTrigger, drafts: Sequence[DraftSignal]) -> float:
    """The expected time spent on drafts that fall: Σ_j draft_ms · (1 - S_j)."""
    wasted, standing = 0.0, 1.0
    for draft in drafts:
        standing *= trigger.curve.at(draft.confidence)
        wasted += trigger.draft_ms * (1.0 - standing)
    return wasted


def drafts_until_decision(trigger: Trigger, num_drafts: int) -> int:
    """How many drafts after `num_drafts` are certain before the trigger can fire, at least 1."""
    if isinstance(trigger, FixedTrigger):
        return max(1, trigger.draft_len - num_drafts)
    return 1


def adapted_threshold(threshold: float, num_drafts: int, num_accepted: int) -> float:
    """EdgeLLM's dynamic threshold of the sequence trigger, after one NAV.

    Halved if all drafts were accepted, so that the next sequence runs longer; else divided by
    0.5^(rejected / drafts), so that it ends earlier (the rule of LLMCad, which EdgeLLM
    extends). Kept in [0.001, 0.99]; a NAV without drafts changes nothing.
    """
    _check_share("threshold", threshold)
    if not 0 <= num_accepted <= num_drafts:
        raise ValueError(f"num_accepted must be in [0, {num_drafts}], got {num_accepted}")
    if num_drafts == 0:
        return threshold
    rejected = (num_drafts - num_accepted) / num_drafts
    factor = 0.5 if rejected == 0.0 else 2.0**rejected
    return min(max(threshold * factor, 0.001), 0.99)


def _standing(drafts: Sequence[DraftSignal]) -> float:
    return math.prod([draft.confidence for draft in drafts])
