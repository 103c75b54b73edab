"""What drafting, the link and the verifier take, as values. Measured by `environment`."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_ID = 4.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Model times: a draft token, and a verifier forward over n ids, v0 + v1·n."""

    draft_ms: float = 36.0
    verify_ms: float = 30.0  # v0
    verify_ms_per_token: float = 0.0  # v1


@dataclass(frozen=True, slots=True)
class Wire:
    """What messages weigh, and whether each must have arrived before the next one leaves."""

    draft_bytes: float = BYTES_PER_ID  # for each draft token; more with its distribution
    message_bytes: float = 96.0  # of a message besides its drafts
    one_request_at_a_time: bool = False

    def num_bytes(self, drafts: int) -> int:
        """Of a message with so many drafts."""
        return round(self.message_bytes + self.draft_bytes * drafts)


IDS_ONLY = Wire()


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A persistent connection: delay pipelines, only overhead and bytes occupy it."""

    rtt_ms: float  # both ways, without the verifier's time
    overhead_ms: float = 0.0  # of one message, whatever its size
    ms_per_byte: float = 0.0
