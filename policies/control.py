"""What a session asks of its control, and what it tells it.

The session (`session.py`) keeps the protocol: epochs, window, deadlines. A control decides how the
drafts from one NAV to the next go. `Constant` decides once and learns nothing; `controller.py` has
all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from policies.trigger import DraftSignal, Trigger


@dataclass(frozen=True, slots=True)
class Plan:
    """How the drafts from one NAV to the next go.

    `batches`: sizes of the token batches that leave ahead of the NAV, period after period; with
    none, drafts leave with their NAV. `decode_on`: if positive, nothing is drafted, and the
    verifier decodes that many tokens by itself (the k = 0 arm).
    """

    trigger: Trigger
    batches: tuple[int, ...] = ()
    decode_on: int = 0

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.batches):
            raise ValueError(f"batches must be sizes >= 1, got {self.batches}")
        if self.decode_on < 0:
            raise ValueError(f"decode_on must be >= 0, got {self.decode_on}")


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft token came `ms` after the one before it, or after the drafter was told to go on."""

    ms: float


@dataclass(frozen=True, slots=True)
class NavSent:
    """A NAV over `draft_len` drafts was requested."""

    draft_len: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict confirmed a draft, or replaced it; drafts after a replaced one are not judged.

    `position` is the draft's in its NAV, from 0.
    """

    draft: DraftSignal
    position: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """A NAV over `draft_len` drafts has its verdict, `ms` after it was sent: `accepted` stand.

    Its message carried `sent_ids` ids; its forward took `verify_ms` over `forward_ids` ids or more.
    `verify_ms` is 0 if an earlier verdict of the same forward has told it. Unless the NAV was
    `alone`, no other of its epoch being under way, `ms` is likely to hold a wait for another one.
    """

    ms: float
    sent_ids: int
    forward_ids: int
    verify_ms: float
    draft_len: int
    accepted: int
    alone: bool


@dataclass(frozen=True, slots=True)
class DecodedOn:
    """The verifier wrote one token by itself, `ms` after the one before it came.

    Its forward, over one id, took `verify_ms`; 0 if an earlier verdict of the same one has told it.
    """

    ms: float
    verify_ms: float


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """No NAV is under way any more: since the plan was made, `ms` passed for `committed` tokens.

    With one NAV at a time and no drafting meanwhile, that is a round of UCB-SpecStop (§V-A).
    """

    draft_len: int
    ms: float
    committed: int


@dataclass(frozen=True, slots=True)
class Committed:
    """So many tokens were committed, while drafting, at a time of the session's clock."""

    count: int
    at_ms: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The client paused, or something was lost: the time since the last tokens tells nothing."""


Observation = (
    Drafted | NavSent | Judged | Answered | DecodedOn | RoundEnded | Committed | Interrupted
)


class Control(Protocol):
    def plan(self) -> Plan:
        """How the next drafts go. Asked when the first of them may be drafted, or sent."""

    def observe(self, observation: Observation) -> None:
        """Learn from what happened in the session."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same plan."""

    constant: Plan

    def plan(self) -> Plan:
        return self.constant

    def observe(self, observation: Observation) -> None:
        """Nothing is learned."""
