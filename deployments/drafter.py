"""EdgeDrafter: drafts ahead on the edge node, as far as each session's credit goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from deployments.engines.protocol import Engine, EngineError, ModelInfo
from deployments.link import DraftToken
from policies.events import GrantDraft, RewindDrafter
from policies.types import Pick, SamplingParams, SessionError


@dataclass(slots=True)
class _Sequence:
    ids: list[int]
    fed: int  # how many of them the engine holds
    epoch: int
    credit_end: int
    feeding: asyncio.Future[list[Pick]] | None = None  # the draft step under way
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EdgeDrafter:
    """Satisfies DrafterLink. `make_engine` is called here, so the weights load in the replica.

    A session beyond `engine.info.max_sessions` waits `place_wait_s` for one that is just ending; it
    waits no longer, since the target can go on without a drafter. `on_sessions` is told the number
    of sessions whenever it changes.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        place_wait_s: float = 1.0,
        on_sessions: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._engine = make_engine()
        self._on_sessions = on_sessions
        self._places = asyncio.Semaphore(self._engine.info.max_sessions)
        self._place_wait_s = place_wait_s
        self._sequences: dict[str, _Sequence] = {}

    async def describe(self) -> ModelInfo:
        return self._engine.info

    @property
    def num_sessions(self) -> int:
        return len(self._sequences)

    async def open(
        self, session: str, ids: Sequence[int], sampling: SamplingParams, grant: GrantDraft
    ) -> AsyncGenerator[DraftToken, None]:
        """Stream draft tokens until the iterator is closed.

        Raises EngineError when every place stays taken or a forward fails.
        """
        try:
            async with asyncio.timeout(self._place_wait_s):
                await self._places.acquire()
        except TimeoutError as error:
            places = self._engine.info.max_sessions
            raise EngineError(f"all {places} drafting places are taken") from error
        credit_end = grant.start + grant.count
        sequence = _Sequence(list(ids), len(ids) - 1, grant.epoch, credit_end)
        self._sequences[session] = sequence
        self._on_sessions(len(self._sequences))
        try:
            await self._engine.open(session, ids, sampling)
            while True:
                token = await self._next_token(session, sequence)
                if token is not None:
                    yield token
        finally:
            del self._sequences[session]
            self._on_sessions(len(self._sequences))
            try:
                await self._engine.close(session)
            finally:
                self._places.release()

    async def steer(
        self, session: str, rewind: RewindDrafter | None, grant: GrantDraft | None
    ) -> None:
        """Rewind, then extend the credit. Raises SessionError for an unknown session."""
        sequence = self._sequences.get(session)
        if sequence is None:
            raise SessionError(f"session {session} is not drafting")
        if rewind is not None:
            sequence.ids[rewind.length :] = rewind.ids
            sequence.fed = min(sequence.fed, rewind.length)
            sequence.epoch = rewind.epoch
            sequence.credit_end = len(sequence.ids)
            if sequence.feeding is not None:
                sequence.feeding.cancel()  # it drafts behind what has just been dropped
        if grant is not None and grant.epoch == sequence.epoch:
            sequence.credit_end = grant.start + grant.count
        sequence.changed.set()

    async def check_health(self) -> None:
        """Raises EngineError if the engine can serve no more."""
        self._engine.check()

    async def _next_token(self, session: str, sequence: _Sequence) -> DraftToken | None:
        """The next draft token; None if a rewind overtook it."""
        while len(sequence.ids) >= sequence.credit_end:
            sequence.changed.clear()
            await sequence.changed.wait()
        epoch, position = sequence.epoch, len(sequence.ids)
        start, sequence.fed = sequence.fed, position
        feed = self._engine.feed(session, start, sequence.ids[start:])
        sequence.feeding = asyncio.ensure_future(feed)
        try:
            (choices,) = await asyncio.gather(sequence.feeding, return_exceptions=True)
        finally:
            sequence.feeding = None
        if isinstance(choices, asyncio.CancelledError):
            sequence.fed = min(sequence.fed, start)  # the engine may hold no more than before
            return None
        if isinstance(choices, BaseException):
            raise choices
        if (sequence.epoch, len(sequence.ids)) != (epoch, position):
            return None
        choice = choices[-1]
        sequence.ids.append(choice.id)
        return DraftToken(epoch, position, choice.id, choice.confidence, choice.entropy)
