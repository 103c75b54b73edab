"""Values and the four messages that edge and cloud exchange (see ARCHITECTURE.md, "One protocol").

A *position* is an index into prompt + generated ids. Every message names its session and epoch;
every range of ids names its absolute start, so a late or repeated message is always recognisable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

Ids = tuple[int, ...]


class SessionError(Exception):
    """An event or message that the protocol does not allow; the session's state is unchanged."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target picks a token. Temperature 0 is greedy; top_k 0 and top_p 1 keep every id.

    Raises ValueError naming the field that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")


@dataclass(frozen=True, slots=True)
class Open:
    """Edge → cloud: hold this sequence. With a higher epoch it rebuilds a lost session."""

    session: str
    epoch: int
    prompt: Ids
    generated: Ids
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()

    @property
    def ids(self) -> Ids:
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class Batch:
    """Edge → cloud: the draft ids at `start`, a token batch.

    With `nav` the verifier judges every draft up to the batch's end, and then decodes up to
    `decode_on` further tokens by itself. An empty batch with `nav` asks for the next target token.
    """

    session: str
    epoch: int
    start: int
    ids: Ids
    nav: bool
    decode_on: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Close:
    """Edge → cloud: forget the session."""

    session: str


class VerdictKind(StrEnum):
    ACCEPTED = "accepted"  # the checked drafts stand; no next token yet (also acknowledges Open)
    BONUS = "bonus"  # the checked drafts stand and `next_id` follows them
    RECOVERED = "recovered"  # a draft fell; `next_id` stands in its place
    VOID = "void"  # a NAV of a closed epoch
    GAP = "gap"  # ids before the NAV are missing; `start` is the expected position
    UNKNOWN_SESSION = "unknown_session"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Cloud → edge: from `start` on, `accepted` drafts stand, and then comes `next_id` if any."""

    session: str
    epoch: int
    start: int
    kind: VerdictKind
    accepted: int = 0
    next_id: int | None = None
    verify_ms: float = 0.0  # what the forward behind it took, on the verifier's clock
    error: str = ""


class Origin(StrEnum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"  # a draft token that the target would have written
    RECOVERED = "recovered"  # the target's token at the first rejection
    BONUS = "bonus"  # the target's token after a fully accepted batch, or decoded on its own


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
