"""Driver, EdgeDrafter and CloudVerifier over the scripted pair, in one process, without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import anyio
import numpy as np
import pytest

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver, GenerationRequest
from deployments.engines.protocol import EngineError, ModelInfo
from deployments.engines.scripted import END_ID, VOCABULARY, ToyModel
from deployments.engines.vocabulary import VocabularyMismatch
from deployments.link import LinkError
from policies.control import Answered, Drafted, Interrupted, Observation, RoundEnded
from policies.controller import Controller, Learned
from policies.events import Emit, GrantDraft
from policies.methods import METHODS
from policies.session import SessionConfig
from policies.trigger import DualThresholdTrigger, FixedTrigger
from policies.types import (
    Batch,
    FinishReason,
    Ids,
    Open,
    SamplingParams,
    Verdict,
    VerdictKind,
)
from tests.deployments.pair import PROMPT, Pair, fails_at

FIXED = {k: SessionConfig(trigger=FixedTrigger(k), max_window=k) for k in (1, 2, 4, 5, 8, 16)}
WINDOW = SessionConfig(
    trigger=FixedTrigger(2), max_window=12, max_navs_in_flight=4, draft_while_waiting=True
)
DUAL = SessionConfig(
    trigger=DualThresholdTrigger(0.3, 0.4, 8), max_window=16, draft_while_waiting=True, batch_len=2
)
OFF = SessionConfig(speculate=False)


@pytest.mark.parametrize("config", [*FIXED.values(), WINDOW, DUAL, OFF])
@pytest.mark.parametrize("agreement", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.2, 5, 0.9, 3)]
)
async def test_output_is_the_targets_own(
    config: SessionConfig, agreement: float, sampling: SamplingParams
) -> None:
    """C01: whatever the draft length, the drafter and the temperature."""
    pair = Pair(agreement=agreement)
    result = await pair.generate(config, sampling=sampling, max_tokens=60)
    assert result.ids == pair.alone(max_tokens=60, sampling=sampling)
    await pair.assert_nothing_is_left()


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=11)])
async def test_a_perfect_drafter_is_accepted_always(sampling: SamplingParams) -> None:
    """C18, and C04 end to end: same logits and same noise leave nothing to reject."""
    pair = Pair(agreement=1.0)
    result = await pair.generate(FIXED[4], sampling=sampling, max_tokens=2_000)
    assert result.metrics.acceptance_rate == 1.0
    assert result.ids == pair.alone(max_tokens=2_000, sampling=sampling)


async def test_the_text_ends_at_the_targets_stop_id() -> None:
    pair = Pair(end_every=25)
    result = await pair.generate(FIXED[8], max_tokens=500)
    assert result.ids == pair.alone(max_tokens=500)
    assert result.ids[-1] == END_ID
    assert result.finish.reason is FinishReason.STOP


async def test_many_sessions_at_once_do_not_mix() -> None:
    pair = Pair()
    prompts = [tuple(f"prompt number {i}".encode()) for i in range(24)]
    results = await asyncio.gather(*(pair.generate(WINDOW, prompt=prompt) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.ids == pair.alone(prompt)
    await pair.assert_nothing_is_left()


async def test_sessions_beyond_the_verifiers_places_wait_and_are_served() -> None:
    pair = Pair(max_sessions=2)
    results = await asyncio.gather(*(pair.generate() for _ in range(7)))
    assert {result.ids for result in results} == {pair.alone()}
    assert all(result.metrics.drafted > 0 for result in results)
    assert all(result.metrics.resends == 0 for result in results)
    await pair.assert_nothing_is_left()


async def test_a_long_wait_for_the_verifier_is_not_begun_anew_by_sending_open_again() -> None:
    """The Open is repeated after silence, but neither the prefill nor the place in the queue."""
    pair = Pair()
    await pair.driver.start()
    prefill, released = pair.target_engine.open, asyncio.Event()
    prefills = 0

    async def slow(session: str, ids: Ids, sampling: SamplingParams) -> None:
        nonlocal prefills
        prefills += 1
        await released.wait()
        await prefill(session, ids, sampling)

    pair.target_engine.open = slow
    asking = asyncio.create_task(pair.generate(SessionConfig(resend_after_ms=1)))
    await asyncio.sleep(0.1)
    released.set()
    assert (await asking).ids == pair.alone()
    assert prefills == 1


async def test_a_late_open_of_an_earlier_epoch_leaves_the_session_alone(pair: Pair) -> None:
    late = Open("s", 0, PROMPT, (), SamplingParams())
    async with aclosing(pair.verifier.open(replace(late, epoch=1))) as live:
        assert (await anext(live)).kind is VerdictKind.ACCEPTED
        async with aclosing(pair.verifier.open(late)) as refused:
            assert [verdict.kind async for verdict in refused] == [VerdictKind.VOID]
        await pair.verifier.push(Batch("s", 1, len(PROMPT), (), nav=True))
        assert (await anext(live)).kind is VerdictKind.BONUS
        assert pair.verifier.num_sessions == 1


async def test_an_engine_that_answers_wrongly_ends_the_request_with_an_error(pair: Pair) -> None:
    await pair.driver.start()

    async def nothing(*_: object) -> list:
        return []

    pair.target_engine.feed = nothing
    result = await pair.generate()
    assert result.finish.reason is FinishReason.ERROR


async def test_an_engine_that_is_shut_down_fails_the_health_checks(pair: Pair) -> None:
    await pair.drafter.check_health()
    await pair.verifier.check_health()
    pair.draft_engine.shutdown()
    pair.target_engine.shutdown()
    for deployment in (pair.drafter, pair.verifier):
        with pytest.raises(EngineError, match="shut down"):
            await deployment.check_health()


@pytest.mark.parametrize("call", [1, 5])
@pytest.mark.parametrize("error", [EngineError("broken"), RuntimeError("a defect")])
async def test_a_failing_drafter_degrades_to_the_target_alone(
    pair: Pair, call: int, error: Exception
) -> None:
    """C35 and C36: a drafter that raises (also for non-finite logits) costs nothing but speed."""
    await pair.driver.start()
    fails_at(pair.draft_engine, call, error)
    result = await pair.generate()
    assert result.ids == pair.alone()
    await pair.assert_nothing_is_left()


async def test_a_hanging_drafter_degrades_to_the_target_alone(pair: Pair) -> None:
    """C35."""

    async def hang(*_: object) -> list:
        await asyncio.Event().wait()
        raise AssertionError

    pair.draft_engine.feed = hang
    result = await pair.generate(SessionConfig(drafter_timeout_ms=30))
    assert result.ids == pair.alone()
    await pair.assert_nothing_is_left()


async def test_a_drafter_without_a_free_place_degrades_to_the_target_alone() -> None:
    pair = Pair(max_sessions=1)
    pair.drafter = EdgeDrafter(lambda: pair.draft_engine, place_wait_s=0.01)
    pair.driver = Driver(pair.drafter, pair.verifier)
    taken = pair.drafter.open("other", PROMPT, SamplingParams(), GrantDraft(0, len(PROMPT), 1))
    async with aclosing(taken):
        await anext(taken)
        result = await pair.generate()
    assert result.ids == pair.alone()
    assert result.metrics.drafted == 0
    assert (await pair.generate()).metrics.drafted > 0


async def test_non_finite_target_logits_fail_the_request_and_only_it() -> None:
    """C36: one session's NaN ends that session with an error; its neighbour goes on."""
    pair = Pair()
    poisoned = tuple(b"poison")
    logits = pair.target.logits

    class Poisoned(ToyModel):
        def logits(self, ids):  # type: ignore[no-untyped-def]
            row = logits(ids)
            if tuple(ids[: len(poisoned)]) == poisoned and len(ids) >= len(poisoned) + 5:
                row[3] = np.nan
            return row

    pair.target_engine._model = Poisoned()
    bad, good = await asyncio.gather(pair.generate(prompt=poisoned), pair.generate())
    assert bad.finish.reason is FinishReason.ERROR
    assert "nan" in bad.finish.error
    assert bad.ids == pair.alone(poisoned)[: len(bad.ids)]
    assert good.ids == pair.alone()
    await pair.assert_nothing_is_left()


async def test_a_defect_in_the_target_engine_ends_the_request_with_an_error(pair: Pair) -> None:
    await pair.driver.start()
    fails_at(pair.target_engine, 3, ZeroDivisionError())
    result = await pair.generate()
    assert result.finish.reason is FinishReason.ERROR
    assert "ZeroDivisionError" in result.finish.error


@pytest.mark.parametrize("committed", [0, 1, 7])
async def test_closing_the_stream_frees_drafter_and_verifier(pair: Pair, committed: int) -> None:
    await pair.driver.start()
    request = GenerationRequest(PROMPT, SamplingParams(), 1_000, WINDOW)
    count = 0
    async with aclosing(pair.driver.open(request).stream()) as stream:
        async for item in stream:
            assert isinstance(item, Emit)
            count += len(item.ids)
            if count >= committed:
                break
    await pair.assert_nothing_is_left()


async def test_a_cancelled_task_frees_drafter_and_verifier(pair: Pair) -> None:
    await pair.driver.start()
    verifying = asyncio.Event()

    async def hang(*_: object) -> list:
        verifying.set()
        await asyncio.Event().wait()
        raise AssertionError

    pair.target_engine.feed = hang
    task = asyncio.create_task(pair.generate(WINDOW))
    await verifying.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pair.assert_nothing_is_left()


class DyingVerifier:
    """A verifier link over replicas that die: each of `deaths` is a number of verdicts."""

    def __init__(self, pair: Pair, deaths: list[int]) -> None:
        self._pair = pair
        self._deaths = deaths
        self._replica = pair.verifier
        self.reopened: list[int] = []

    async def describe(self):  # type: ignore[no-untyped-def]
        return await self._replica.describe()

    async def open(self, opening: Open) -> AsyncGenerator[Verdict, None]:
        if opening.epoch:
            self.reopened.append(len(opening.generated))
        left = self._deaths.pop(0) if self._deaths else 10**9
        async with aclosing(self._replica.open(opening)) as stream:
            async for verdict in stream:
                yield verdict
                left -= 1
                if left == 0:
                    self._replica = Pair().verifier  # nothing of the session survives
                    raise LinkError("the replica died")

    async def push(self, batch: Batch) -> Verdict | None:
        return await self._replica.push(batch)

    async def close(self, message) -> None:  # type: ignore[no-untyped-def]
        await self._replica.close(message)


@pytest.mark.parametrize("deaths", [[1], [3], [5, 1, 1, 4]])
@pytest.mark.parametrize("config", [FIXED[4], WINDOW, OFF])
async def test_after_a_replicas_death_the_continuation_is_exact(
    pair: Pair, deaths: list[int], config: SessionConfig
) -> None:
    num_deaths = len(deaths)
    dying = DyingVerifier(pair, deaths)
    pair.driver._verifier = dying
    result = await pair.generate(config, max_tokens=80)
    assert result.ids == pair.alone(max_tokens=80)
    assert len(dying.reopened) == num_deaths
    assert dying.reopened == sorted(dying.reopened)


async def test_a_verifier_that_never_comes_back_ends_the_request_with_an_error(pair: Pair) -> None:
    await pair.driver.start()

    class Gone(DyingVerifier):
        async def open(self, opening: Open) -> AsyncGenerator[Verdict, None]:
            raise LinkError("no route")
            yield

    pair.driver._verifier = Gone(pair, [])
    result = await pair.generate(SessionConfig(give_up_after_ms=300))
    assert result.finish.reason is FinishReason.ERROR
    assert "silent" in result.finish.error


async def test_a_pair_with_different_vocabularies_is_refused_at_the_start(pair: Pair) -> None:
    """C21."""
    other = (*VOCABULARY[:65], b"?", *VOCABULARY[66:])
    pair.draft_engine.info = replace(pair.draft_engine.info, vocabulary=other)
    with pytest.raises(VocabularyMismatch, match="65"):
        await pair.driver.start()
    assert pair.driver.models is None


async def test_a_model_that_dies_before_it_has_told_is_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.driver._RETRY_DESCRIBE_S", 0.0)
    describe, failures = pair.verifier.describe, iter([LinkError("dead"), LinkError("dead")])

    async def dying() -> ModelInfo:
        for failure in failures:
            raise failure
        return await describe()

    pair.verifier.describe = dying  # type: ignore[method-assign]
    assert (await pair.generate()).ids == pair.alone()
    assert pair.driver.missing == []


async def test_a_drafters_padding_id_is_never_emitted() -> None:
    """C21: the drafter proposes an id past the target's vocabulary; it is rejected by value."""
    pair = Pair()
    await pair.driver.start()
    feed = pair.draft_engine.feed

    async def padding(session, position, ids):  # type: ignore[no-untyped-def]
        choices = await feed(session, position, ids)
        return [replace(choice, id=300) for choice in choices]

    pair.draft_engine.feed = padding
    result = await pair.generate()
    assert result.ids == pair.alone()
    assert result.metrics.accepted == 0


async def test_nothing_of_an_earlier_session_shows_in_a_later_one() -> None:
    """C20: long A, short B, A again, B again, and A cut half way before B."""
    pair = Pair(max_sessions=1)
    long, short = tuple(b"a long request " * 20), tuple(b"b")
    for prompt in (long, short, long, short):
        assert (await pair.generate(prompt=prompt)).ids == pair.alone(prompt)
    request = GenerationRequest(long, SamplingParams(), 500, FIXED[4])
    async with aclosing(pair.driver.open(request).stream()) as stream:
        async for _ in stream:
            break
    fresh = await Pair(max_sessions=1).generate(prompt=short)
    again = await pair.generate(prompt=short)
    assert (again.ids, again.metrics.accepted) == (fresh.ids, fresh.metrics.accepted)


async def test_a_web_server_that_cancels_every_await_still_frees_both_sides(pair: Pair) -> None:
    """Starlette ends an abandoned stream inside an anyio scope, where each await is cancelled."""
    await pair.driver.start()
    request = GenerationRequest(PROMPT, SamplingParams(), 1_000, FIXED[4])
    with anyio.CancelScope() as scope:
        async with aclosing(pair.driver.open(request).stream()) as stream:
            async for _ in stream:
                scope.cancel()
    await pair.assert_nothing_is_left()


class Overtaken:
    """A verifier link on which the first batch arrives before its Open.

    With `late_answer`, the answer to that batch comes only after the acknowledgement.
    """

    def __init__(self, pair: Pair, *, late_answer: bool) -> None:
        self._replica = pair.verifier
        self._late_answer = late_answer
        self._pushed, self._acknowledged = asyncio.Event(), asyncio.Event()

    async def describe(self):  # type: ignore[no-untyped-def]
        return await self._replica.describe()

    async def open(self, opening: Open) -> AsyncGenerator[Verdict, None]:
        await self._pushed.wait()
        async with aclosing(self._replica.open(opening)) as stream:
            async for verdict in stream:
                yield verdict
                self._acknowledged.set()

    async def push(self, batch: Batch) -> Verdict | None:
        answer = await self._replica.push(batch)
        self._pushed.set()
        if answer is not None and self._late_answer:
            await self._acknowledged.wait()
        return answer

    async def close(self, message) -> None:  # type: ignore[no-untyped-def]
        await self._replica.close(message)


@pytest.mark.parametrize("late_answer", [False, True])
@pytest.mark.parametrize("config", [FIXED[4], WINDOW, OFF])
async def test_a_batch_that_overtakes_its_open_costs_no_resend(
    pair: Pair, config: SessionConfig, late_answer: bool
) -> None:
    pair.driver._verifier = Overtaken(pair, late_answer=late_answer)
    patient = replace(config, resend_after_ms=3_600_000.0, give_up_after_ms=7_200_000.0)
    async with asyncio.timeout(30):
        result = await pair.generate(patient)
    assert result.ids == pair.alone()
    await pair.assert_nothing_is_left()


class JumpingClock:
    """Real milliseconds, and what the test adds."""

    def __init__(self) -> None:
        self.ahead_ms = 0.0

    def __call__(self) -> float:
        return time.monotonic() * 1000.0 + self.ahead_ms


@pytest.mark.parametrize("stall_ms", [11_000.0, 400_000.0])
@pytest.mark.parametrize("config", [SessionConfig(), WINDOW, DUAL, OFF])
@pytest.mark.parametrize("answered", [False, True])
async def test_a_client_that_pauses_is_no_silence_of_the_models(
    pair: Pair,
    config: SessionConfig,
    stall_ms: float,
    answered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Past every deadline, whether the answers lie in the inbox by then or are on their way."""
    clock = JumpingClock()
    monkeypatch.setattr("deployments.driver._now_ms", clock)
    await pair.driver.start()
    sampling = SamplingParams(stop_ids=frozenset({END_ID}))
    generation = pair.driver.open(GenerationRequest(PROMPT, sampling, 40, config))
    ids: list[int] = []
    async with aclosing(generation.stream()) as stream:
        async for item in stream:
            if isinstance(item, Emit):
                ids.extend(item.ids)
                if answered:
                    await anyio.wait_all_tasks_blocked()
                clock.ahead_ms += stall_ms
    assert tuple(ids) == pair.alone()
    assert generation.metrics.resends == generation.metrics.reopens == 0
    assert generation.speculating == config.speculate


async def test_a_verifier_that_dies_while_the_client_pauses_is_not_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is longer than `give_up_after_ms`; after it the session is opened again."""
    clock, dead = JumpingClock(), asyncio.Event()
    monkeypatch.setattr("deployments.driver._now_ms", clock)
    await pair.driver.start()
    opening, opens = pair.verifier.open, 0

    async def dying(message: Open) -> AsyncGenerator[Verdict, None]:
        nonlocal opens
        opens += 1
        async with aclosing(opening(message)) as verdicts:
            async for verdict in verdicts:
                yield verdict
                if opens == 1 and verdict.kind is VerdictKind.BONUS:
                    await dead.wait()
                    raise LinkError("the replica died")

    pair.verifier.open = dying  # type: ignore[method-assign]
    sampling = SamplingParams(stop_ids=frozenset({END_ID}))
    generation = pair.driver.open(GenerationRequest(PROMPT, sampling, 40, OFF))
    ids: list[int] = []
    async with aclosing(generation.stream()) as stream:
        async for item in stream:
            if not isinstance(item, Emit):
                assert item.reason is FinishReason.LENGTH
                continue
            ids.extend(item.ids)
            if not dead.is_set():
                clock.ahead_ms += 400_000.0
                dead.set()
                await anyio.wait_all_tasks_blocked()
    assert tuple(ids) == pair.alone()
    assert (opens, generation.metrics.reopens) == (2, 1)


async def test_tokens_are_counted_as_of_when_they_came_not_of_when_the_client_took_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target writes on while the client pauses for a second over each piece."""
    clock = JumpingClock()
    monkeypatch.setattr("deployments.driver._now_ms", clock)
    await pair.driver.start()
    generation = pair.driver.open(GenerationRequest(PROMPT, SamplingParams(), 40, OFF))
    async with aclosing(generation.stream()) as stream:
        async for _ in stream:
            await anyio.wait_all_tasks_blocked()
            clock.ahead_ms += 1_000.0
    assert generation.metrics.tpt_ms is not None
    assert generation.metrics.tpt_ms < 500.0


async def test_a_slow_client_does_not_distort_what_is_learned(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pauses of a second are neither draft steps of none nor rounds of one."""
    clock = JumpingClock()
    monkeypatch.setattr("deployments.driver._now_ms", clock)
    await pair.driver.start()
    learned = Learned(METHODS["pipesd"])
    config = learned.method.session_config()
    request = GenerationRequest(PROMPT, SamplingParams(), 200, config, learned)
    seen: list[Observation] = []
    observe = Controller.observe

    def watched(controller: Controller, observation: Observation) -> None:
        seen.append(observation)
        observe(controller, observation)

    monkeypatch.setattr(Controller, "observe", watched)
    async with aclosing(pair.driver.open(request).stream()) as stream:
        async for item in stream:
            if isinstance(item, Emit):
                await anyio.wait_all_tasks_blocked()
                clock.ahead_ms += 1_000.0
    assert all(one.ms > 0.0 for one in seen if isinstance(one, Drafted))
    assert all(one.ms < 900.0 for one in seen if isinstance(one, Answered | RoundEnded))
    assert any(isinstance(one, Interrupted) for one in seen)
