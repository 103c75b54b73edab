"""CloudVerifier: hosts the verifying half of every session on one target engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable

from deployments.engines.protocol import Engine, EngineError, ModelInfo
from policies.events import Check, Checked, CloudAction, EngineFailed, Prefill, Prefilled, Reply
from policies.types import Batch, Close, Open, SessionError, Verdict, VerdictKind
from policies.verify_session import VerifySession

logger = logging.getLogger(__name__)

_OPEN_BEHIND_S = 0.02  # un-awaited calls may overtake each other; an Open is seldom later than this


class CloudVerifier:
    """Satisfies VerifierLink. `make_engine` is called here, so the weights load in the replica.

    At most `engine.info.max_sessions` sessions are held; further ones wait for a place.
    `on_sessions` is told their number, the waiting ones included, whenever it changes.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        max_window: int,
        on_sessions: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._engine = make_engine()
        self._on_sessions = on_sessions
        self._max_window = max_window
        self._places = asyncio.Semaphore(self._engine.info.max_sessions)
        self._hosted: dict[str, _Hosted] = {}

    async def describe(self) -> ModelInfo:
        return self._engine.info

    @property
    def num_sessions(self) -> int:
        return len(self._hosted)

    async def open(self, opening: Open) -> AsyncGenerator[Verdict, None]:
        """Hold the session and stream its verdicts until the iterator or the session is closed.

        Opening a session that is held already moves its stream here and keeps what is verified; an
        epoch below the session's is refused and leaves its stream alone.
        """
        hosted = self._hosted.get(opening.session)
        if hosted is not None and opening.epoch < hosted.epoch:
            yield Verdict(opening.session, opening.epoch, len(opening.ids), VerdictKind.VOID)
            return
        if hosted is None:
            hosted = _Hosted(opening.session, self._engine, self._places, self._max_window)
            self._hosted[opening.session] = hosted
            self._on_sessions(len(self._hosted))
        verdicts = hosted.attach()
        try:
            hosted.take(opening)
            while (verdict := await verdicts.get()) is not None:
                yield verdict
        finally:
            if hosted.verdicts is verdicts:
                del self._hosted[opening.session]
                self._on_sessions(len(self._hosted))
                await hosted.stop()

    async def push(self, batch: Batch) -> Verdict | None:
        """Give the session a batch; its verdicts go to the stream. Unknown sessions say so here."""
        if batch.session not in self._hosted:
            await asyncio.sleep(_OPEN_BEHIND_S)
        hosted = self._hosted.get(batch.session)
        if hosted is None:
            return Verdict(batch.session, batch.epoch, batch.start, VerdictKind.UNKNOWN_SESSION)
        hosted.take(batch)
        return None

    async def close(self, message: Close) -> None:
        """End the session's stream, which frees its place; unknown sessions are ignored."""
        hosted = self._hosted.get(message.session)
        if hosted is not None:
            hosted.verdicts.put_nowait(None)

    async def check_health(self) -> None:
        """Raises EngineError if the engine can serve no more."""
        self._engine.check()


class _Hosted:
    """One session: performs what its VerifySession decides on the engine and the stream."""

    def __init__(
        self, name: str, engine: Engine, places: asyncio.Semaphore, max_window: int
    ) -> None:
        self._name = name
        self._session = VerifySession(
            name,
            context=engine.info.context,
            vocab_size=len(engine.info.vocabulary),
            max_window=max_window,
        )
        self._engine = engine
        self._places = places
        self._has_place = False
        self.verdicts: asyncio.Queue[Verdict | None] = asyncio.Queue()
        self._forward: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        return self._session.epoch

    def attach(self) -> asyncio.Queue[Verdict | None]:
        """A new stream for the session's verdicts; the one before ends."""
        self.verdicts.put_nowait(None)
        self.verdicts = asyncio.Queue()
        return self.verdicts

    def take(self, message: Open | Batch) -> None:
        try:
            actions = self._session.handle(message)
        except SessionError as error:
            start = len(message.ids) if isinstance(message, Open) else message.start
            kind = VerdictKind.ERROR
            self.verdicts.put_nowait(
                Verdict(self._name, message.epoch, start, kind, error=str(error))
            )
            return
        self._perform(actions)

    async def stop(self) -> None:
        """Forget the sequence and give the place to the next session."""
        if self._forward is not None:
            self._forward.cancel()
        try:
            await self._engine.close(self._name)
        finally:
            if self._has_place:
                self._places.release()

    def _perform(self, actions: list[CloudAction]) -> None:
        for action in actions:
            match action:
                case Reply(verdict=verdict):
                    self.verdicts.put_nowait(verdict)
                case Prefill() | Check():
                    self._forward = asyncio.create_task(self._run(action))

    async def _run(self, work: Prefill | Check) -> None:
        try:
            event = await self._call_engine(work)
            actions = self._session.handle(event)
        except EngineError as error:
            actions = self._session.handle(EngineFailed(str(error)))
        except Exception as error:
            # a defect must end the session with an error, not leave its client waiting
            logger.exception("session %s: the engine failed", self._name)
            actions = self._session.handle(EngineFailed(f"internal error: {type(error).__name__}"))
        self._perform(actions)

    async def _call_engine(self, work: Prefill | Check) -> Prefilled | Checked:
        if not self._has_place:
            await self._places.acquire()
            self._has_place = True
        started = time.perf_counter()
        match work:
            case Prefill(ids=ids, sampling=sampling):
                await self._engine.close(self._name)
                await self._engine.open(self._name, ids, sampling)
                return Prefilled(_ms_since(started))
            case Check(position=position, ids=ids):
                choices = await self._engine.feed(self._name, position, ids)
                logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
                target_ids = [choice.id for choice in choices]
                return Checked(target_ids, _ms_since(started), logprobs)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000.0
