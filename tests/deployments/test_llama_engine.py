"""The llama.cpp engine: what every session may rely on, whatever the others do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np
import pytest

from deployments.engines.llama import LlamaEngine
from deployments.engines.llama_context import Logits, Row
from deployments.engines.protocol import EngineError
from policies.types import Pick, SamplingParams
from serve_app.bench.near_ties import compare, teacher_forced
from serve_app.bench.prompts import HUMANEVAL, all_prompts

GREEDY = SamplingParams()
TEXTS = [
    "def quicksort(items):\n",
    "The capital of France is",
    "import numpy as np\n\nx = np.",
    "Once upon a time there was a",
]


@pytest.fixture
async def engine(small_path: Path) -> AsyncGenerator[LlamaEngine, None]:
    engine = LlamaEngine(small_path, name="small", context=256, max_sessions=4, threads=2)
    yield engine
    engine.shutdown()


def ids_of(engine: LlamaEngine, text: str) -> list[int]:
    return engine.info.tokenizer().encode(text)


async def write(
    engine: LlamaEngine, session: str, prompt: list[int], count: int, sampling: SamplingParams
) -> list[int]:
    """Decode `count` tokens one by one; the session stays open."""
    await engine.open(session, prompt, sampling)
    ids = list(prompt)
    for _ in range(count):
        [choice] = await engine.feed(session, len(ids) - 1, ids[-1:])
        ids.append(choice.id)
    return ids[len(prompt) :]


def assert_own_or_near_tie(
    path: Path, prompt: list[int], generated: list[int], sampling: SamplingParams = GREEDY
) -> None:
    """Every token is the model's, given the ids before it, but for kernel rounding."""
    judge = teacher_forced(path, 512, threads=2)
    assert compare(judge, prompt, generated, sampling).mismatches == 0


async def test_concurrent_sessions_write_what_each_writes_alone(
    engine: LlamaEngine, small_path: Path
) -> None:
    prompts = [ids_of(engine, text) for text in TEXTS]
    sampling = [GREEDY, SamplingParams(0.8, seed=1), GREEDY, SamplingParams(1.0, 40, 0.9, 2)]
    written = await asyncio.gather(
        *(
            write(engine, str(i), prompt, 16, params)
            for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        )
    )
    for prompt, generated, params in zip(prompts, written, sampling, strict=True):
        assert_own_or_near_tie(small_path, prompt, generated, params)


async def test_the_same_model_as_drafter_is_accepted(draft_path: Path) -> None:
    """C18: at least 99 % of a perfect drafter's tokens at every batch size, and no drift."""
    engine = LlamaEngine(draft_path, name="draft", context=512, max_sessions=2, threads=2)
    try:
        prompt = engine.info.tokenizer().encode(all_prompts(HUMANEVAL)[0])
        ids = prompt + await write(engine, "draft", prompt, 128, GREEDY)
        for draft_len in (1, 2, 4, 8):
            await engine.open("target", prompt, GREEDY)
            agreed: list[bool] = []
            for at in range(len(prompt), len(ids), draft_len):
                batch = ids[at - 1 : at - 1 + draft_len]
                choices = await engine.feed("target", at - 1, batch)
                agreed += [c.id == i for c, i in zip(choices, ids[at:], strict=False)]
            await engine.close("target")
            assert sum(agreed) / len(agreed) >= 0.99
            assert sum(agreed[64:]) >= sum(agreed[:64]) - 1
    finally:
        engine.shutdown()


async def test_feeding_at_an_earlier_position_drops_what_came_after(engine: LlamaEngine) -> None:
    prompt = ids_of(engine, TEXTS[1])
    generated = await write(engine, "s", prompt, 8, GREEDY)
    await engine.feed("s", len(prompt) + 2, [5, 6, 7])
    [choice] = await engine.feed("s", len(prompt), generated[:1])
    assert choice.id == generated[1]
    with pytest.raises(EngineError, match="none at position"):
        await engine.feed("s", len(prompt) + 5, [1])


async def test_a_rewind_that_the_cache_refuses_is_repaired_by_prefilling_again(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids_of(engine, TEXTS[1])
    generated = await write(engine, "s", prompt, 8, GREEDY)
    monkeypatch.setattr(engine._context, "remove", lambda slot, start: False)
    choices = await engine.feed("s", len(prompt), generated[:4])
    assert [choice.id for choice in choices] == generated[1:5]
    assert engine.repaired_rewinds == 1


async def test_a_slot_keeps_nothing_of_its_last_session(engine: LlamaEngine) -> None:
    """C20: A, B, A, B on the same slot, and B after an A that was cut."""
    long, short = ids_of(engine, " ".join(TEXTS) * 3), ids_of(engine, TEXTS[1])
    first: dict[int, list[int]] = {}
    for prompt in (long, short, long, short):
        generated = await write(engine, "s", prompt, 8, GREEDY)
        await engine.close("s")
        assert first.setdefault(len(prompt), generated) == generated


async def test_sessions_beyond_the_slots_are_refused_and_a_closed_one_makes_room(
    engine: LlamaEngine,
) -> None:
    for i in range(4):
        await engine.open(str(i), [1, 2], GREEDY)
    with pytest.raises(EngineError, match="4"):
        await engine.open("more", [1, 2], GREEDY)
    await engine.close("0")
    await engine.open("more", [1, 2], GREEDY)


async def test_ids_past_the_context_are_refused_and_the_session_goes_on(
    engine: LlamaEngine,
) -> None:
    """C17: the block does not fit; nothing of it is kept."""
    await engine.open("s", [1] * 254, GREEDY)
    with pytest.raises(EngineError, match="256"):
        await engine.feed("s", 253, [1, 2, 3, 4])
    assert len(await engine.feed("s", 253, [1, 2, 3])) == 3
    with pytest.raises(EngineError, match="256"):
        await engine.open("t", [1] * 257, GREEDY)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_non_finite_logits_fail_one_session_only(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    """C36: both sessions are in the same forward."""
    good, poisoned = ids_of(engine, TEXTS[0]), ids_of(engine, TEXTS[1])
    expected = await write(engine, "good", good, 2, GREEDY)
    await engine.open("poisoned", poisoned, GREEDY)
    slot = engine._sequences["poisoned"].slot
    forward, logits = engine._context.forward, engine._context.logits
    forwards: list[Sequence[Row]] = []

    def recording(rows: Sequence[Row]) -> None:
        forwards.append(rows)
        forward(rows)

    def poisoning(row: int) -> Logits:
        values = logits(row)
        if forwards[-1][row].sequence == slot:
            values[7] = bad
        return values

    monkeypatch.setattr(engine._context, "forward", recording)
    monkeypatch.setattr(engine._context, "logits", poisoning)
    failed, choices = await asyncio.gather(
        engine.feed("poisoned", len(poisoned) - 1, poisoned[-1:]),
        engine.feed("good", len(good) - 1, [good[-1], *expected[:1]]),
        return_exceptions=True,
    )
    assert isinstance(failed, EngineError)
    assert [choice.id for choice in choices] == expected
    assert len(forwards) == 1
    monkeypatch.undo()
    again = await engine.feed("poisoned", len(poisoned) - 1, poisoned[-1:])
    assert len(again) == 1


async def test_a_failed_forward_is_told_and_the_session_is_rebuilt(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids_of(engine, TEXTS[1])
    generated = await write(engine, "s", prompt, 4, GREEDY)

    def failing(rows: Sequence[Row]) -> None:
        monkeypatch.undo()
        raise EngineError("llama_decode failed with status -3")

    monkeypatch.setattr(engine._context, "forward", failing)
    with pytest.raises(EngineError, match="status"):
        await engine.feed("s", len(prompt) + 1, generated[1:3])
    choices = await engine.feed("s", len(prompt) + 1, generated[1:3])
    assert [choice.id for choice in choices] == generated[2:4]


async def test_a_short_feed_does_not_wait_for_a_long_prefill(engine: LlamaEngine) -> None:
    await engine.open("short", [1, 2, 3], GREEDY)
    order: list[str] = []

    async def note(name: str, call) -> None:  # type: ignore[no-untyped-def]
        await call
        order.append(name)

    await asyncio.gather(
        note("prefill", engine.open("long", [1] * 240, GREEDY)),
        note("feed", engine.feed("short", 2, [3])),
    )
    assert order == ["feed", "prefill"]


async def test_an_abandoned_call_leaves_the_engine_usable(engine: LlamaEngine) -> None:
    task = asyncio.create_task(engine.open("long", [1] * 240, GREEDY))
    await engine.open("s", [1, 2, 3], GREEDY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.close("long")
    [choice] = await engine.feed("s", 2, [3])
    assert isinstance(choice, Pick)
    assert len(engine._free_slots) == 3


class Gate:
    """Lets an engine's forwards begin one by one."""

    def __init__(self, engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sessions: list[set[int]] = []  # of each forward
        self.broken_off = 0
        self._entered, self._leave = threading.Semaphore(0), threading.Semaphore(0)
        forward = engine._context.forward

        def gated(rows: Sequence[Row]) -> None:
            self.sessions.append({row.sequence for row in rows})
            self._entered.release()
            self._leave.acquire(timeout=10.0)
            try:
                forward(rows)
            except EngineError as error:
                self.broken_off += "broken off" in str(error)
                raise

        monkeypatch.setattr(engine._context, "forward", gated)

    async def next_is_due(self) -> None:
        assert await asyncio.to_thread(self._entered.acquire, timeout=10.0)

    def begin(self) -> None:
        self._leave.release()


async def test_a_forward_that_nobody_waits_for_is_broken_off(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids_of(engine, TEXTS[0])
    generated = await write(engine, "s", prompt, 4, GREEDY)
    gate = Gate(engine, monkeypatch)
    feeding = asyncio.create_task(engine.feed("s", len(prompt) + 1, generated[1:2]))
    await gate.next_is_due()
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    gate.begin()
    gate.begin()
    choices = await engine.feed("s", len(prompt), generated[:3])
    assert [choice.id for choice in choices] == generated[1:4]
    assert gate.broken_off == 1


async def test_a_forward_that_another_session_waits_for_goes_on(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in ("first", "s", "t"):
        await engine.open(session, [1, 2, 3], GREEDY)
    [alone] = await engine.feed("t", 2, [3])
    gate = Gate(engine, monkeypatch)
    first = asyncio.create_task(engine.feed("first", 2, [3]))
    await gate.next_is_due()
    left, kept = (asyncio.create_task(engine.feed(session, 2, [3])) for session in ("s", "t"))
    await asyncio.sleep(0)  # both are queued, so that they share the next forward
    gate.begin()
    await gate.next_is_due()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    gate.begin()
    assert [choice.id for choice in await kept] == [alone.id]
    await first
    assert [len(sessions) for sessions in gate.sessions] == [1, 2]
    assert gate.broken_off == 0


async def test_closing_a_session_ends_its_call(engine: LlamaEngine) -> None:
    opening = asyncio.create_task(engine.open("s", [1] * 240, GREEDY))
    await asyncio.sleep(0)
    await engine.close("s")
    with pytest.raises(EngineError, match="closed"):
        await opening


async def test_shutdown_ends_waiting_calls_and_refuses_new_ones(small_path: Path) -> None:
    engine = LlamaEngine(small_path, name="small", context=256, max_sessions=1, threads=2)
    waiting = asyncio.create_task(engine.open("s", [1] * 240, GREEDY))
    await asyncio.sleep(0)
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        await waiting
    with pytest.raises(EngineError, match="shut down"):
        await engine.feed("s", 0, [1])


async def test_confidence_is_a_probability(engine: LlamaEngine) -> None:
    await engine.open("s", [1, 2, 3], GREEDY)
    choices = await engine.feed("s", 2, [3, 4, 5])
    assert all(0.0 < choice.confidence <= 1.0 for choice in choices)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(EngineError, match="cannot load"):
        LlamaEngine(tmp_path / "x.gguf", name="x", context=64, max_sessions=1, threads=1)


async def test_an_engine_whose_forward_hangs_is_no_longer_healthy(small_path: Path) -> None:
    """C52: the event loop still answers, so only the engine's own check can tell."""
    engine = LlamaEngine(
        small_path, name="small", context=64, max_sessions=1, threads=1, stall_s=0.0
    )
    hangs, goes_on = threading.Event(), threading.Event()
    forward = engine._context.forward

    def hanging(rows: Sequence[Row]) -> None:
        hangs.set()
        goes_on.wait()
        forward(rows)

    engine._context.forward = hanging  # type: ignore[method-assign]
    engine.check()
    opening = asyncio.create_task(engine.open("a", [1, 2, 3], GREEDY))
    await asyncio.to_thread(hangs.wait)
    try:
        with pytest.raises(EngineError, match="takes over 0 s"):
            engine.check()
    finally:
        goes_on.set()
    await opening
    engine.check()
    engine.shutdown()
