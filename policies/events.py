"""What the two sans-I/O halves of the protocol take and return, besides the four messages.

Times are milliseconds on any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.types import (
    Batch,
    Close,
    FinishReason,
    Ids,
    Open,
    Origin,
    SamplingParams,
    TokenLogprobs,
    Verdict,
)

# ---- DraftSession: events, then actions


@dataclass(frozen=True, slots=True)
class TokenDrafted:
    """The drafter's token for `position`, drafted in the drafter's `epoch`."""

    epoch: int
    position: int
    id: int
    confidence: float
    at_ms: float
    entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """The drafter failed or broke its contract; the target goes on alone."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """`arrived_ms` is for the metrics, if `at_ms` is of a clock that stands still at times."""

    verdict: Verdict
    at_ms: float
    arrived_ms: float | None = None


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Nothing sent can be answered any more (dead replica, broken connection)."""

    at_ms: float


@dataclass(frozen=True, slots=True)
class LinkRestored:
    at_ms: float


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    at_ms: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    at_ms: float


@dataclass(frozen=True, slots=True)
class OpenSession:
    message: Open


@dataclass(frozen=True, slots=True)
class GrantDraft:
    """Credit: the drafter may draft `count` tokens from `start` on without asking again."""

    epoch: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class RewindDrafter:
    """The drafter keeps its first `length` ids, appends `ids`, and drafts as `epoch` from there.

    Credit granted before is void. Emitted too when the drafter only lags behind (nothing dropped).
    """

    epoch: int
    length: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class SendBatch:
    message: Batch


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Raise `DeadlinePassed` at this time; replaces the deadline before. None: no deadline."""

    at_ms: float | None


@dataclass(frozen=True, slots=True)
class Emit:
    """These ids are committed, in order, each with where it came from.

    `logprobs` has an entry per id if the sampling parameters ask for them, else none. `refuted`:
    the last id stands where a draft stood that was another.
    """

    ids: Ids
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    refuted: bool = False


@dataclass(frozen=True, slots=True)
class CloseSession:
    message: Close


@dataclass(frozen=True, slots=True)
class Finish:
    """The last action of every session."""

    reason: FinishReason
    error: str = ""


EdgeEvent = (
    TokenDrafted
    | DrafterLost
    | VerdictArrived
    | LinkLost
    | LinkRestored
    | DeadlinePassed
    | Cancelled
)
EdgeAction = (
    OpenSession
    | GrantDraft
    | RewindDrafter
    | SendBatch
    | SetDeadline
    | Emit
    | CloseSession
    | Finish
)


# ---- VerifySession: events, then actions


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The engine holds the sequence that the last `Prefill` named."""

    verify_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """The target's own token after each id of the last `Check`, and its log-probabilities if asked.

    May be cut short after the first one that differs from the draft there.
    """

    target_ids: Sequence[int]
    verify_ms: float = 0.0
    logprobs: Sequence[TokenLogprobs | None] = ()


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The last `Prefill` or `Check` failed; the session cannot go on."""

    error: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rebuild the engine's sequence. Answered by `Prefilled` or `EngineFailed`."""

    ids: Ids = field(repr=False)
    sampling: SamplingParams = field(repr=False)


@dataclass(frozen=True, slots=True)
class Check:
    """Feed `ids` at `position`: the last verified id and the drafts after it (one NAV forward).

    Answered by `Checked` or `EngineFailed`.
    """

    position: int
    ids: Ids = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """Send the verdict to the edge."""

    verdict: Verdict


CloudEvent = Open | Batch | Prefilled | Checked | EngineFailed
CloudAction = Prefill | Check | Reply
