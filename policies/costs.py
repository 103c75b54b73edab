"""What drafting, the link and the verifier take, as values. Measured by `environment`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Model times: a draft token, and a verifier forward over n ids, v0 + v1·n."""

    draft_ms: float = 36.0
    verify_ms: float = 30.0  # v0
    verify_ms_per_token: float = 0.0  # v1


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A persistent connection: delay pipelines, only overhead and bytes occupy it."""

    rtt_ms: float  # both ways, without the verifier's time
    overhead_ms: float = 0.0  # of one message, whatever its size
    ms_per_byte: float = 0.0
