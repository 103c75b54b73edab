"""Driver: runs each request's DraftSession over a drafter and a verifier link.

Performs what the session decides and feeds back what happens; decides nothing itself. Needs no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace

from deployments.engines.protocol import ModelInfo, Tokenizer
from deployments.engines.vocabulary import compare_vocabularies
from deployments.link import DrafterLink, DraftToken, LinkError, VerifierLink, message_bytes
from policies.controller import Controller, Learned
from policies.events import (
    Cancelled,
    CloseSession,
    DeadlinePassed,
    DrafterLost,
    EdgeAction,
    EdgeEvent,
    Emit,
    Finish,
    GrantDraft,
    LinkLost,
    LinkRestored,
    OpenSession,
    RewindDrafter,
    SendBatch,
    SetDeadline,
    TokenDrafted,
    VerdictArrived,
)
from policies.metrics import SessionMetrics
from policies.session import DraftSession, SessionConfig
from policies.types import Batch, Close, Ids, Open, SamplingParams, SessionError, Verdict

logger = logging.getLogger(__name__)

_RECONNECT_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # waits between attempts to reach a lost verifier
_RETRY_DRAFTER_S = 0.2
_RETRY_DESCRIBE_S = 0.5
_STALLED_MS = 500.0  # a deadline noticed so late says nothing about the other side
_PAUSE_MS = 5.0  # a client that takes longer over a piece distorts what is measured
_CLOSE_S = 1.0  # how long a verifier may take to hear of the end before its stream is cut


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request in token ids."""

    prompt: Ids
    sampling: SamplingParams
    max_tokens: int
    config: SessionConfig
    learned: Learned | None = None  # by what its drafting is controlled; None: by `config` alone


@dataclass(frozen=True, slots=True)
class Models:
    """The two loaded models, and the target's tokenizer, which alone turns text into ids."""

    draft: ModelInfo
    target: ModelInfo
    tokenizer: Tokenizer


class Driver:
    """Serves requests over one drafter and one verifier link."""

    def __init__(self, drafter: DrafterLink, verifier: VerifierLink) -> None:
        self._drafter = drafter
        self._verifier = verifier
        self._waiting_for = {"draft", "target"}
        self._endings: set[asyncio.Task[None]] = set()  # of generations, kept from the collector
        self._choosing: asyncio.Task[None] | None = None
        self.models: Models | None = None  # until `start` has returned

    @property
    def missing(self) -> list[str]:
        """Which of the two models is not loaded yet."""
        return sorted(self._waiting_for)

    async def start(self) -> None:
        """Wait until both models are loaded, and for either that dies before it has told.

        Raises VocabularyMismatch if they are no pair.
        """

        async def loaded(role: str, link: DrafterLink | VerifierLink) -> ModelInfo:
            told = ""
            while True:
                try:
                    info = await link.describe()
                except LinkError as error:
                    if str(error) != told:
                        told = str(error)
                        logger.warning("the %s model is not there yet: %s", role, error)
                    await asyncio.sleep(_RETRY_DESCRIBE_S)
                else:
                    self._waiting_for.discard(role)
                    return info

        draft, target = await asyncio.gather(
            loaded("draft", self._drafter), loaded("target", self._verifier)
        )
        compare_vocabularies(draft.vocabulary, target.vocabulary)
        tokenizer = await asyncio.to_thread(target.tokenizer)
        self.models = Models(draft, target, tokenizer)

    def open(self, request: GenerationRequest) -> Generation:
        """A generation that has not begun. Raises ValueError naming what is out of range."""
        if self.models is None:
            raise RuntimeError("the driver has not been started")
        session = DraftSession(
            uuid.uuid4().hex,
            request.prompt,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            draft_context=self.models.draft.context,
            target_context=self.models.target.context,
            config=request.config,
            control=None if request.learned is None else Controller(request.learned),
        )
        return Generation(
            session, request, self._drafter, self._verifier, self._endings, self._tune
        )

    def _tune(self, learned: Learned) -> None:
        """Have the next setting chosen, if one is due: in a thread, since it takes 0.2 s."""
        if learned.setting_due and (self._choosing is None or self._choosing.done()):
            self._choosing = asyncio.create_task(asyncio.to_thread(learned.choose_setting))

    async def drain(self) -> None:
        """Wait until every generation that has ended holds nothing on either side."""
        while self._endings:
            await asyncio.wait(self._endings)


class Generation:
    """One running request."""

    def __init__(
        self,
        session: DraftSession,
        request: GenerationRequest,
        drafter: DrafterLink,
        verifier: VerifierLink,
        endings: set[asyncio.Task[None]],
        tune: Callable[[Learned], None],
    ) -> None:
        self.name = session.name
        self._endings = endings
        self._tune = tune
        self._session = session
        self._request = request
        self._drafter = drafter
        self._verifier = verifier
        self._inbox: asyncio.Queue[EdgeEvent] = asyncio.Queue()
        self._deadline_ms: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._verdicts: asyncio.Task[None] | None = None
        self._drafts: asyncio.Task[None] | None = None
        self._steering: asyncio.Queue[tuple[RewindDrafter | None, GrantDraft | None]]
        self._steering = asyncio.Queue()
        self._closing: asyncio.Task[None] | None = None
        self._stream_epoch = 0
        self._link_down = False
        self._attempts = 0
        self._paused_at_ms: float | None = None  # since when the client has the word
        self._paused_ms = 0.0

    @property
    def metrics(self) -> SessionMetrics:
        return self._session.metrics

    @property
    def speculating(self) -> bool:
        """False from the moment on that the target decodes alone."""
        return self._session.speculating

    async def stream(self) -> AsyncGenerator[Emit | Finish, None]:
        """Committed ids as they come; a Finish is last, unless the iterator is closed before.

        To be called once. Closing the iterator cancels the request on both sides; `Driver.drain`
        waits until they have let go.
        """
        try:
            actions = self._session.start(self._clock_ms())
            while True:
                for action in self._perform(actions):
                    self._paused_at_ms = _now_ms()
                    yield action
                    pause_ms = _now_ms() - self._paused_at_ms
                    self._paused_at_ms = None
                    self._paused_ms += pause_ms
                    if pause_ms > _PAUSE_MS:
                        self._session.paused()
                if self._session.finished is not None:
                    return
                if self._request.learned is not None:
                    self._tune(self._request.learned)
                actions = self._handle(await self._next_event())
        finally:
            self._perform(self._session.handle(Cancelled(self._clock_ms())))
            # by itself: the client need not wait for it, and a web server may cancel every await
            stopping = asyncio.create_task(self._stop())
            self._endings.add(stopping)
            stopping.add_done_callback(self._endings.discard)

    def _clock_ms(self) -> float:
        """The session's time, which stands still while the client reads: that is nobody's silence.

        So it is at the start what `_now_ms` is, and behind it later.
        """
        now_ms = _now_ms() if self._paused_at_ms is None else self._paused_at_ms
        return now_ms - self._paused_ms

    # ---- events in

    async def _next_event(self) -> EdgeEvent:
        """What arrived, or a deadline that passed."""
        deadline_ms = self._deadline_ms
        while True:
            wait_s = (
                None if deadline_ms is None else max(0.0, deadline_ms - self._clock_ms()) / 1000.0
            )
            try:
                async with asyncio.timeout(wait_s):
                    return await self._inbox.get()
            except TimeoutError:
                assert deadline_ms is not None
                now_ms = self._clock_ms()
                if now_ms - deadline_ms < _STALLED_MS:
                    return DeadlinePassed(max(now_ms, deadline_ms))
                # it is this process that stood still: what came meanwhile is not in the inbox yet
                deadline_ms = now_ms + _STALLED_MS

    def _handle(self, event: EdgeEvent) -> list[EdgeAction]:
        try:
            actions = self._session.handle(event)
        except SessionError as error:
            logger.warning("session %s: %s", self.name, error)
            if isinstance(event, TokenDrafted):
                return self._session.handle(DrafterLost(event.at_ms))
            return self._session.fail(str(error))
        if self._drafts is not None and not self._session.speculating:
            logger.warning("session %s: no drafter any more, the target goes on alone", self.name)
            self._drafts.cancel()
            self._drafts = None
        return actions

    # ---- actions out

    def _perform(self, actions: list[EdgeAction]) -> list[Emit | Finish]:
        """Start what the actions ask for; what of them the client gets."""
        output: list[Emit | Finish] = []
        rewind: RewindDrafter | None = None
        grant: GrantDraft | None = None
        for action in actions:
            match action:
                case OpenSession(message=opening):
                    self._connect(opening)
                case SendBatch(message=batch):
                    self._spawn(self._push(batch))
                case CloseSession(message=message):
                    self._closing = self._spawn(self._close(message))
                case RewindDrafter():
                    rewind = action
                case GrantDraft():
                    grant = action
                case SetDeadline(at_ms=at_ms):
                    self._deadline_ms = at_ms
                case Emit() | Finish():
                    self._attempts = 0
                    output.append(action)
        if self._session.finished is None and (rewind is not None or grant is not None):
            self._steer(rewind, grant)
        return output

    def _connect(self, opening: Open) -> None:
        former = self._verdicts
        if former is not None and not former.done() and opening.epoch == self._stream_epoch:
            return  # the Open is under way on a reliable link: it waits for a place or prefills
        self._link_down = False
        self._stream_epoch = opening.epoch
        # a former stream is left to end by itself: it may still bring verdicts, and to close it
        # before the verifier has moved the session here would end the session
        self._verdicts = self._spawn(self._read_verdicts(opening))

    async def _read_verdicts(self, opening: Open) -> None:
        reason = "the verdict stream ended"
        self.metrics.uplink_bytes += message_bytes(opening)
        try:
            async with aclosing(self._verifier.open(opening)) as verdicts:
                async for verdict in verdicts:
                    self._take_verdict(verdict)
        except LinkError as error:
            reason = str(error)
        self._lose_link(opening.epoch, reason)

    async def _push(self, batch: Batch) -> None:
        self.metrics.uplink_bytes += message_bytes(batch)
        try:
            verdict = await self._verifier.push(batch)
        except LinkError as error:
            self._lose_link(batch.epoch, str(error))
        else:
            if verdict is not None:
                self._take_verdict(verdict)

    def _take_verdict(self, verdict: Verdict) -> None:
        self.metrics.downlink_bytes += message_bytes(verdict)
        arrived_ms = _now_ms()
        self._inbox.put_nowait(VerdictArrived(verdict, self._clock_ms(), arrived_ms))

    def _lose_link(self, epoch: int, reason: str) -> None:
        if self._link_down or epoch < self._stream_epoch or self._session.finished:
            return
        self._link_down = True
        logger.warning("session %s: lost the verifier, opening again: %s", self.name, reason)
        self._inbox.put_nowait(LinkLost(self._clock_ms()))
        self._spawn(self._reconnect())

    async def _reconnect(self) -> None:
        await asyncio.sleep(_RECONNECT_S[min(self._attempts, len(_RECONNECT_S) - 1)])
        self._attempts += 1
        self._inbox.put_nowait(LinkRestored(self._clock_ms()))

    async def _close(self, message: Close) -> None:
        try:
            await self._verifier.close(message)
        except LinkError as error:
            logger.info("session %s: closed on a lost link: %s", self.name, error)

    def _steer(self, rewind: RewindDrafter | None, grant: GrantDraft | None) -> None:
        if self._drafts is not None:
            self._steering.put_nowait((rewind, grant))
        elif grant is not None:
            ids = self._request.prompt + self._session.generated
            self._drafts = self._spawn(self._read_drafts(ids[: grant.start], grant))

    async def _read_drafts(self, ids: Ids, grant: GrantDraft) -> None:
        steering = self._spawn(self._send_steering())
        try:
            while True:
                drafting = await self._draft(ids, grant)
                if drafting or self._session.opened:
                    break
                # a session that still waits for its verifier may wait for a drafter too
                await asyncio.sleep(_RETRY_DRAFTER_S)
        finally:
            steering.cancel()
        self._inbox.put_nowait(DrafterLost(self._clock_ms()))

    async def _draft(self, ids: Ids, grant: GrantDraft) -> bool:
        """Pass on draft tokens until the drafter is lost; whether any came."""
        drafting = False
        try:
            sampling = replace(self._session.sampling, logprobs=None)
            async with aclosing(self._drafter.open(self.name, ids, sampling, grant)) as drafts:
                async for token in drafts:
                    drafting = True
                    self._inbox.put_nowait(_drafted(token, self._clock_ms()))
        except Exception as error:
            # whatever befalls the drafter, the target can write the answer
            logger.warning("session %s: the drafter failed: %s", self.name, error)
        return drafting

    async def _send_steering(self) -> None:
        while True:
            rewind, grant = await self._steering.get()
            try:
                await self._drafter.steer(self.name, rewind, grant)
            except (LinkError, SessionError) as error:
                logger.warning("session %s: the drafter cannot be steered: %s", self.name, error)
                self._inbox.put_nowait(DrafterLost(self._clock_ms()))
                return

    # ---- tasks

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop(self) -> None:
        """Close both streams and wait until they are closed, so that nothing is left behind."""
        if self._closing is not None:
            await asyncio.wait({self._closing}, timeout=_CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _now_ms() -> float:
    return time.monotonic() * 1000.0


def _drafted(token: DraftToken, at_ms: float) -> TokenDrafted:
    return TokenDrafted(
        token.epoch, token.position, token.id, token.confidence, at_ms, token.entropy
    )
