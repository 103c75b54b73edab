"""A GGUF model served by llama.cpp, several sequences in one context.

One thread of the engine's own makes every llama.cpp call. Between two forwards it takes what the
sessions have asked for meanwhile: waiting feeds share a forward, and a long prefill, which goes in
by chunks, delays a feed by one chunk at most.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deployments.engines.llama_context import LlamaContext, Row
from deployments.engines.protocol import EngineError, ModelInfo
from deployments.engines.tokenizer import LlamaTokenizer, vocab_gguf
from policies.sampling import NonFiniteLogits, pick
from policies.types import Pick, SamplingParams


class _Reply:
    """What an asyncio caller awaits and the engine's thread gives."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[list[Pick]] = self._loop.create_future()

    def succeed(self, choices: list[Pick]) -> None:
        self._settle(lambda: self.future.set_result(choices))

    def fail(self, reason: str) -> None:
        self._settle(lambda: self.future.set_exception(EngineError(reason)))

    def _settle(self, settle: Callable[[], None]) -> None:
        def unless_cancelled() -> None:
            if not self.future.done():
                settle()

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(unless_cancelled)


@dataclass(slots=True, eq=False)
class _Job:
    """A call that needs forwards: KV for the ids before `end`, a choice after each from `start`."""

    reply: _Reply
    start: int
    end: int
    opens: bool
    choices: list[Pick] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A session's ids, `cached` of which have their KV; the others get it with the next feed."""

    session: str
    slot: int
    sampling: SamplingParams
    held: list[int]
    cached: int = 0


_Call = Callable[[_Reply], None]
_Plan = list[tuple[_Sequence, int]]  # how many ids of each sequence the next forward takes


class LlamaEngine:
    """Implements Engine. `repaired_rewinds` counts rewinds that took a new prefill.

    A forward takes up to `batch_tokens`, `prefill_tokens` of them for prefills. After a cancelled
    open the session is not open; after a cancelled feed it holds at least what it held before
    `position`. On a CPU, a forward that nobody waits for any more is broken off. One that takes
    longer than `stall_s` fails the `check`, since nothing else shows that the thread hangs. Raises
    EngineError if the model cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        context: int,
        max_sessions: int,
        threads: int,
        batch_tokens: int = 256,
        prefill_tokens: int = 32,
        stall_s: float = 60.0,
    ) -> None:
        self._context = LlamaContext(
            path, context=context, slots=max_sessions, threads=threads, batch_tokens=batch_tokens
        )
        self.info = ModelInfo(
            name=name,
            context=context,
            max_sessions=max_sessions,
            vocabulary=self._context.vocabulary,
            end_ids=self._context.end_ids,
            tokenizer=partial(LlamaTokenizer, vocab_gguf(path)),
        )
        self.repaired_rewinds = 0
        self._batch_tokens = batch_tokens
        self._prefill_tokens = prefill_tokens
        self._free_slots = set(range(max_sessions))
        self._sequences: dict[str, _Sequence] = {}
        self._jobs: dict[_Sequence, _Job] = {}  # in the order of their calls
        self._calls: queue.SimpleQueue[tuple[_Call, _Reply] | None] = queue.SimpleQueue()
        self._stall_s = stall_s
        self._forward_began: float | None = None  # time.monotonic(), while a forward runs
        self._running: list[_Job] = []  # whose forward runs; guarded by `_lock`
        self._stopped = False
        self._lock = threading.Lock()  # nothing is queued once `_stopped` is set; see `_running`
        self._thread = threading.Thread(target=self._run, name=f"llama {name}", daemon=True)
        self._thread.start()

    async def open(self, session: str, ids: Sequence[int], sampling: SamplingParams) -> None:
        await self._ask(partial(self._open, session, list(ids), sampling))

    async def feed(self, session: str, position: int, ids: Sequence[int]) -> list[Pick]:
        return await self._ask(partial(self._feed, session, position, list(ids)))

    async def close(self, session: str) -> None:
        # carried out even if the caller is cancelled meanwhile: nobody else would free the slot
        await asyncio.shield(asyncio.ensure_future(self._ask(partial(self._close, session))))

    def check(self) -> None:
        if self._stopped or not self._thread.is_alive():
            raise EngineError(f"engine {self.info.name} is shut down")
        began = self._forward_began
        if began is not None and time.monotonic() - began > self._stall_s:
            raise EngineError(f"engine {self.info.name}: a forward takes over {self._stall_s:g} s")

    def shutdown(self) -> None:
        with self._lock:
            self._stopped = True
            self._calls.put(None)
        self._thread.join()

    async def _ask(self, call: _Call) -> list[Pick]:
        reply = _Reply()
        with self._lock:
            if self._stopped:
                raise EngineError(f"engine {self.info.name} is shut down")
            self._calls.put((call, reply))
        try:
            return await reply.future
        except asyncio.CancelledError:
            with self._lock:
                if self._running and all(job.reply.future.cancelled() for job in self._running):
                    self._context.break_off()
            raise

    # everything below runs in the engine's thread

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._drop_cancelled()
                if plan := self._plan():
                    self._forward(plan)
        finally:
            with self._lock:
                self._stopped = True
            replies = [job.reply for job in self._jobs.values()]
            while not self._calls.empty():
                if (item := self._calls.get()) is not None:
                    replies.append(item[1])
            for reply in replies:
                reply.fail(f"engine {self.info.name} is shut down")
            self._context.free()

    def _take_calls(self) -> bool:
        """Begin the calls that wait, or the next one if nothing else is to do; False at the end."""
        with suppress(queue.Empty):
            item = self._calls.get(block=not self._jobs)
            while item is not None:
                self._drop_cancelled()  # so that a caller that gave up may call again
                call, reply = item
                if not reply.future.cancelled():
                    try:
                        call(reply)
                    except EngineError as error:
                        reply.fail(str(error))
                item = self._calls.get_nowait()
            return False
        return True

    def _open(self, session: str, ids: list[int], sampling: SamplingParams, reply: _Reply) -> None:
        if session in self._sequences:
            raise EngineError(f"session {session} is open already")
        self._check(session, 0, ids)
        if not self._free_slots:
            raise EngineError(f"all {self.info.max_sessions} sessions are open: no free slot")
        # the lowest, since llama.cpp puts sequences into one forward only if they are neighbours
        slot = min(self._free_slots)
        self._free_slots.remove(slot)
        sequence = _Sequence(session, slot, sampling, ids)
        self._sequences[session] = sequence
        last = max(0, len(ids) - 1)
        self._start(sequence, _Job(reply, start=last, end=last, opens=True))

    def _feed(self, session: str, position: int, ids: list[int], reply: _Reply) -> None:
        sequence = self._sequences.get(session)
        if sequence is None:
            raise EngineError(f"session {session} is not open")
        if sequence in self._jobs:
            raise EngineError(f"session {session} has a call running")
        if not 0 <= position <= len(sequence.held):
            raise EngineError(
                f"session {session} holds {len(sequence.held)} ids, none at position {position}"
            )
        self._check(session, position, ids)
        self._rewind(sequence, position)
        sequence.held += ids
        end = len(sequence.held) if ids else 0
        self._start(sequence, _Job(reply, start=position, end=end, opens=False))

    def _close(self, session: str, reply: _Reply) -> None:
        if sequence := self._sequences.get(session):
            self._forget(sequence)
            if job := self._jobs.pop(sequence, None):
                job.reply.fail(f"session {session} was closed")
        reply.succeed([])

    def _check(self, session: str, position: int, ids: list[int]) -> None:
        """Raises EngineError for what would fail the forward of every session in it."""
        if position + len(ids) > self.info.context:
            raise EngineError(
                f"session {session} has room for {self.info.context} ids (context), "
                f"not {position + len(ids)}"
            )
        wrong = [i for i in ids if not 0 <= i < len(self.info.vocabulary)]
        if wrong:
            raise EngineError(f"session {session}: id {wrong[0]} is not in the vocabulary")

    def _start(self, sequence: _Sequence, job: _Job) -> None:
        if sequence.cached >= job.end:
            job.reply.succeed([])
        else:
            self._jobs[sequence] = job

    def _plan(self) -> _Plan:
        """Feeds first, then a chunk's worth of prefill, in equal shares."""
        room = self._batch_tokens
        plan: _Plan = []
        prefills = []
        for sequence, job in self._jobs.items():
            if sequence.cached < job.start:
                prefills.append((job.start - sequence.cached, sequence))
            elif room:
                count = min(job.end - sequence.cached, self._prefill_tokens, room)
                plan.append((sequence, count))
                room -= count
        room = min(room, self._prefill_tokens)
        prefills.sort(key=lambda prefill: prefill[0])
        for taken, (missing, sequence) in enumerate(prefills):
            count = min(missing, -(-room // (len(prefills) - taken)))
            if count:
                plan.append((sequence, count))
                room -= count
        return sorted(plan, key=lambda entry: entry[0].slot)  # neighbours go in together

    def _forward(self, plan: _Plan) -> None:
        rows = [
            Row(sequence.held[at], at, sequence.slot, at >= self._jobs[sequence].start)
            for sequence, count in plan
            for at in range(sequence.cached, sequence.cached + count)
        ]
        self._forward_began = time.monotonic()
        with self._lock:
            self._running = [self._jobs[sequence] for sequence, _ in plan]
        try:
            self._context.forward(rows)
        except EngineError as error:
            for sequence, _ in plan:
                self._abort(sequence).fail(str(error))
            return
        finally:
            self._forward_began = None
            with self._lock:
                self._running = []
                self._context.resume()
        first_row = 0
        for sequence, count in plan:
            self._advance(sequence, count, first_row)
            first_row += count

    def _advance(self, sequence: _Sequence, count: int, first_row: int) -> None:
        """Take in what the forward made of `count` ids, the first of them in `first_row`."""
        job = self._jobs[sequence]
        try:
            for i in range(count):
                if sequence.cached + i >= job.start:
                    logits = self._context.logits(first_row + i)
                    position = sequence.cached + i + 1
                    choice = pick(logits, sequence.sampling, sequence.held, position)
                    job.choices.append(choice)
        except NonFiniteLogits as error:
            self._abort(sequence).fail(f"session {sequence.session}: {error}")
            return
        sequence.cached += count
        if sequence.cached == job.end:
            del self._jobs[sequence]
            job.reply.succeed(job.choices)

    def _drop_cancelled(self) -> None:
        cancelled = [s for s, job in self._jobs.items() if job.reply.future.cancelled()]
        for sequence in cancelled:
            self._abort(sequence)

    def _abort(self, sequence: _Sequence) -> _Reply:
        """End its job, and undo what the job did."""
        job = self._jobs.pop(sequence)
        if job.opens:
            self._forget(sequence)
        else:
            del sequence.held[job.start :]
            self._drop_cached(sequence, min(sequence.cached, job.start))
        return job.reply

    def _rewind(self, sequence: _Sequence, position: int) -> None:
        del sequence.held[position:]
        if position < sequence.cached:
            self._drop_cached(sequence, position)

    def _drop_cached(self, sequence: _Sequence, start: int) -> None:
        if self._context.remove(sequence.slot, start):
            sequence.cached = start
        else:
            self._context.clear(sequence.slot)
            sequence.cached = 0
            self.repaired_rewinds += 1

    def _forget(self, sequence: _Sequence) -> None:
        self._context.clear(sequence.slot)
        del self._sequences[sequence.session]
        self._free_slots.add(sequence.slot)
