"""The cloud's half of the protocol, sans I/O: messages and engine results in, actions out.

The verified prefix is the only memory. Every token in it is the target's own, so the verdict on
any range that lies inside it can be given again at any time: a duplicate costs no forward, and a
lost verdict is repeated by asking again. The module knows no engine, no link and no clock.
"""

from __future__ import annotations

from itertools import takewhile

from policies.events import (
    Check,
    Checked,
    CloudAction,
    CloudEvent,
    EngineFailed,
    Prefill,
    Prefilled,
    Reply,
)
from policies.types import (
    Batch,
    Open,
    SessionError,
    TokenLogprobs,
    Verdict,
    VerdictKind,
)


class VerifySession:
    """Judges one session's drafts, one engine call at a time; waiting NAVs merge into one forward.

    Guarantees: a position, once verified, never changes; drafts are buffered at most `max_window`
    past the verified prefix; nothing is verified past a stop id or at `context`; an id outside the
    vocabulary is never fed, so it falls like any wrong draft.
    """

    def __init__(self, session: str, *, context: int, vocab_size: int, max_window: int) -> None:
        self._session = session
        self._context = context
        self._vocab_size = vocab_size
        self._max_window = max_window
        self._opening: Open | None = None
        self.epoch = -1
        self._verified: list[int] = []
        self._logprobs: dict[int, TokenLogprobs | None] = {}  # by verified position, if asked for
        self._ended = False  # the verified prefix ends with a stop id
        self._working: Prefill | Check | None = None
        self._stale_prefix = False  # the engine does not hold the verified prefix yet
        self._enter(-1)

    @property
    def verified_len(self) -> int:
        return len(self._verified)

    def handle(self, event: CloudEvent) -> list[CloudAction]:
        """Take one event. Raises SessionError, and changes nothing, if the protocol forbids it."""
        match event:
            case Open():
                return self._on_open(event)
            case Batch():
                return self._on_batch(event)
            case Prefilled(verify_ms=verify_ms):
                return self._on_prefilled(verify_ms)
            case Checked():
                return self._on_checked(event)
            case EngineFailed(error=error):
                return self._on_failed(error)

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        self._diverged_at: int | None = None  # where this epoch's ids left the verified prefix
        self._drafts: dict[int, int] = {}  # position → draft id past the verified prefix
        self._untold: set[int] = set()  # positions of drafts that no verdict has covered yet
        self._navs: dict[int, int] = {}  # end → start of the NAVs not answered yet
        self._decode_from = self._decode_until = 0  # positions owed to a decode_on

    def _on_open(self, opening: Open) -> list[CloudAction]:
        if opening.session != self._session or not opening.ids:
            raise SessionError(f"session {self._session} cannot be opened by {opening}")
        if len(opening.ids) >= self._context:
            raise SessionError(
                f"{len(opening.ids)} tokens leave no room in a context of {self._context}"
            )
        if opening.epoch < self.epoch:
            return [self._reply(VerdictKind.VOID, self.verified_len, epoch=opening.epoch)]
        if self._opening is not None and opening.epoch == self._opening.epoch:
            return [] if self._preparing else [self._acknowledgement()]
        if opening.epoch > self.epoch:
            self._enter(opening.epoch)
        if not self._continues(opening):
            self._verified = list(opening.ids)
            self._logprobs.clear()
            stop_ids = opening.sampling.stop_ids
            self._ended = bool(opening.generated) and opening.ids[-1] in stop_ids
            self._stale_prefix = True
        self._opening = opening
        if self._preparing:
            return self._next_work()
        return [self._acknowledgement(), *self._answer(0.0), *self._next_work()]

    def _continues(self, opening: Open) -> bool:
        """Whether the re-opened sequence is one whose verified prefix is held here already."""
        last = self._opening
        return (
            last is not None
            and (last.prompt, last.sampling) == (opening.prompt, opening.sampling)
            and tuple(self._verified[: len(opening.ids)]) == opening.ids
        )

    @property
    def _preparing(self) -> bool:
        return self._stale_prefix or isinstance(self._working, Prefill)

    def _on_batch(self, batch: Batch) -> list[CloudAction]:
        if self._opening is None or batch.session != self._session or batch.start < 1:
            raise SessionError(f"session {self._session} does not take {batch}")
        if len(batch.ids) > self._max_window:
            raise SessionError(f"{len(batch.ids)} drafts exceed the window of {self._max_window}")
        if batch.epoch >= self.epoch and batch.nav and batch.end >= self._context:
            raise SessionError(f"position {batch.end} is past the context of {self._context}")
        if batch.epoch < self.epoch:
            return self._void_if_nav(batch)
        if batch.epoch == self.epoch:
            self._refuse_changed_drafts(batch)
        else:
            self._enter(batch.epoch)
        bound = min(self.verified_len + self._max_window, self._context)
        for position, draft_id in enumerate(batch.ids, batch.start):
            if position < bound:
                self._drafts[position] = draft_id
                self._untold.add(position)
        actions: list[CloudAction] = []
        if batch.nav:
            self._navs[batch.end] = min(batch.start, self._navs.get(batch.end, batch.start))
            if batch.decode_on or batch.end + 1 >= self._decode_from:  # not a late, earlier NAV
                self._decode_from = batch.end + 1
                self._decode_until = min(self._decode_from + batch.decode_on, self._context)
        actions += self._answer(0.0)
        if batch.nav and batch.end in self._navs and batch.end > self._contiguous_end():
            actions.append(self._reply(VerdictKind.GAP, self._contiguous_end()))
        return actions + self._next_work()

    def _refuse_changed_drafts(self, batch: Batch) -> None:
        for position, draft_id in enumerate(batch.ids, batch.start):
            if self._drafts.get(position, draft_id) != draft_id:
                raise SessionError(
                    f"the draft at position {position} is not the one that epoch {batch.epoch} had"
                )

    def _on_prefilled(self, verify_ms: float) -> list[CloudAction]:
        if not isinstance(self._working, Prefill):
            raise SessionError("no prefill was asked for")
        self._working = None
        if self._stale_prefix:
            return self._next_work()
        return [self._acknowledgement(verify_ms), *self._answer(verify_ms), *self._next_work()]

    def _on_checked(self, checked: Checked) -> list[CloudAction]:
        check, target_ids = self._working, checked.target_ids
        if not isinstance(check, Check) or not 1 <= len(target_ids) <= len(check.ids):
            raise SessionError(f"{len(target_ids)} target ids do not answer {check}")
        if checked.logprobs and len(checked.logprobs) != len(target_ids):
            raise SessionError(f"{len(checked.logprobs)} logprobs for {len(target_ids)} target ids")
        self._working = None
        if self._stale_prefix:  # a re-open changed the sequence under the forward
            return self._next_work()
        assert self._opening is not None
        # the epoch may have moved on; what the target said of this prefix holds all the same
        for offset, target_id in enumerate(target_ids, 1):
            if checked.logprobs:
                self._logprobs[self.verified_len] = checked.logprobs[offset - 1]
            self._verified.append(target_id)
            self._ended = target_id in self._opening.sampling.stop_ids
            if self._ended or check.ids[offset : offset + 1] != (target_id,):
                break
        return self._answer(checked.verify_ms) + self._next_work()

    def _on_failed(self, error: str) -> list[CloudAction]:
        if self._working is None:
            raise SessionError("nothing was asked of the engine")
        self._working = None
        if self._stale_prefix:  # a re-open changed the sequence under the forward
            return self._next_work()
        self._stale_prefix = True
        self._enter(self.epoch)
        return [Reply(self._verdict(VerdictKind.ERROR, self.verified_len, error=error))]

    def _answer(self, verify_ms: float) -> list[CloudAction]:
        """Compare drafts with what is verified by now; every verdict that can be given.

        The first one carries the time of the forward.
        """
        for position in sorted(p for p in self._drafts if p < self.verified_len):
            # batches may be out of order: an earlier position can disagree later
            if self._drafts.pop(position) != self._verified[position]:
                self._diverged_at = min(position, self._diverged_at or position)
        if self._diverged_at is not None:
            self._drafts.clear()
            self._decode_until = 0
        replies: list[CloudAction] = []
        for end, start in sorted(self._navs.items()):
            first = self._first_untold(start)
            verdict = self._verdict_on(first, end, 0.0 if replies else verify_ms)
            if verdict is not None:
                del self._navs[end]
                self._untold = {position for position in self._untold if position >= end}
                replies.append(Reply(verdict))
        while self._decode_from < min(self.verified_len, self._decode_until):
            replies.append(self._bonus(self._decode_from, 0, 0.0 if replies else verify_ms))
            self._decode_from += 1
        return replies

    def _first_untold(self, start: int) -> int:
        """Where a NAV's verdict begins: drafts sent ahead of it, without a gap, belong to it."""
        while start - 1 in self._untold:
            start -= 1
        return start

    def _verdict_on(self, start: int, end: int, verify_ms: float) -> Verdict | None:
        """The verdict on this epoch's drafts [start, end), or None if it needs a forward."""
        diverged_at = self._diverged_at
        if diverged_at is not None and start > diverged_at:
            return self._verdict(VerdictKind.VOID, start)
        if diverged_at is not None and end > diverged_at:
            return self._verdict(
                VerdictKind.RECOVERED,
                start,
                accepted=diverged_at - start,
                next_id=self._verified[diverged_at],
                verify_ms=verify_ms,
            )
        if end < self.verified_len:
            return self._bonus(start, end - start, verify_ms).verdict
        if self._ended:
            accepted = max(0, self.verified_len - start)
            return self._verdict(
                VerdictKind.ACCEPTED, start, accepted=accepted, verify_ms=verify_ms
            )
        return None

    def _next_work(self) -> list[CloudAction]:
        if self._working is not None:
            return []
        if self._stale_prefix:
            assert self._opening is not None
            self._stale_prefix = False
            self._working = Prefill(tuple(self._verified), self._opening.sampling)
            return [self._working]
        contiguous_end = self._contiguous_end()
        ready = [end for end in self._navs if end <= contiguous_end]
        decoding = self._decode_from <= self.verified_len < self._decode_until
        if not ready and (self._ended or not decoding):
            return []
        wanted = (self._drafts[p] for p in range(self.verified_len, max(ready, default=0)))
        drafts = takewhile(lambda draft_id: 0 <= draft_id < self._vocab_size, wanted)
        self._working = Check(self.verified_len - 1, (self._verified[-1], *drafts))
        return [self._working]

    def _contiguous_end(self) -> int:
        end = self.verified_len
        while end in self._drafts:
            end += 1
        return end

    def _void_if_nav(self, batch: Batch) -> list[CloudAction]:
        if not batch.nav:
            return []
        return [self._reply(VerdictKind.VOID, batch.start, epoch=batch.epoch)]

    def _acknowledgement(self, verify_ms: float = 0.0) -> Reply:
        return Reply(self._verdict(VerdictKind.ACCEPTED, self.verified_len, verify_ms=verify_ms))

    def _bonus(self, start: int, accepted: int, verify_ms: float) -> Reply:
        next_id = self._verified[start + accepted]
        return Reply(
            self._verdict(
                VerdictKind.BONUS, start, accepted=accepted, next_id=next_id, verify_ms=verify_ms
            )
        )

    def _reply(self, kind: VerdictKind, start: int, epoch: int | None = None) -> Reply:
        return Reply(self._verdict(kind, start, epoch=epoch))

    def _verdict(
        self,
        kind: VerdictKind,
        start: int,
        *,
        accepted: int = 0,
        next_id: int | None = None,
        verify_ms: float = 0.0,
        epoch: int | None = None,
        error: str = "",
    ) -> Verdict:
        return Verdict(
            session=self._session,
            epoch=self.epoch if epoch is None else epoch,
            start=start,
            kind=kind,
            accepted=accepted,
            next_id=next_id,
            verify_ms=verify_ms,
            error=error,
            logprobs=self._logprobs_of(start, start + accepted + (next_id is not None)),
        )

    def _logprobs_of(self, start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
        if self._opening is None or self._opening.sampling.logprobs is None:
            return ()
        return tuple(self._logprobs.get(position) for position in range(start, end))
