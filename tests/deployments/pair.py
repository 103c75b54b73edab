"""The scripted pair with its driver in one process, and ways to break it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver, GenerationRequest
from deployments.engines.scripted import END_ID, ScriptedEngine, ToyModel
from deployments.verifier import CloudVerifier
from policies.events import Emit, Finish
from policies.metrics import SessionMetrics
from policies.session import SessionConfig
from policies.types import Ids, Pick, SamplingParams

PROMPT: Ids = tuple(b"once upon a time")


@dataclass
class Result:
    """What a client got of one request."""

    ids: Ids
    finish: Finish
    metrics: SessionMetrics


@dataclass
class Pair:
    """A drafter and a verifier over scripted engines, and a driver between them."""

    agreement: float = 0.8
    end_every: int = 0
    draft_context: int = 4096
    target_context: int = 4096
    max_sessions: int = 64
    draft_engine: ScriptedEngine = field(init=False)
    target_engine: ScriptedEngine = field(init=False)

    def __post_init__(self) -> None:
        self.target = ToyModel(0, 1.0, self.end_every)
        self.draft_engine = ScriptedEngine(
            ToyModel(0, self.agreement, self.end_every),
            context=self.draft_context,
            max_sessions=self.max_sessions,
        )
        self.target_engine = ScriptedEngine(
            self.target, context=self.target_context, max_sessions=self.max_sessions
        )
        self.drafter = EdgeDrafter(lambda: self.draft_engine)
        self.verifier = CloudVerifier(lambda: self.target_engine, max_window=64)
        self.driver = Driver(self.drafter, self.verifier)

    async def generate(
        self,
        config: SessionConfig | None = None,
        *,
        prompt: Ids = PROMPT,
        max_tokens: int = 40,
        sampling: SamplingParams | None = None,
        stop_ids: frozenset[int] = frozenset({END_ID}),
    ) -> Result:
        if self.driver.models is None:
            await self.driver.start()
        generation = self.driver.open(
            GenerationRequest(
                prompt,
                replace(sampling or SamplingParams(), stop_ids=stop_ids),
                max_tokens,
                config or SessionConfig(),
            )
        )
        ids: list[int] = []
        finish: Finish | None = None
        async with aclosing(generation.stream()) as stream:
            async for item in stream:
                if isinstance(item, Emit):
                    ids.extend(item.ids)
                else:
                    finish = item
        assert finish is not None
        return Result(tuple(ids), finish, generation.metrics)

    def alone(
        self, prompt: Ids = PROMPT, max_tokens: int = 40, sampling: SamplingParams | None = None
    ) -> Ids:
        """What the target writes by itself."""
        return self.target.write(prompt, max_tokens, sampling or SamplingParams())

    async def assert_nothing_is_left(self) -> None:
        await self.driver.drain()
        assert self.drafter.num_sessions == 0
        assert self.verifier.num_sessions == 0
        assert self.draft_engine.num_sessions == 0
        assert self.target_engine.num_sessions == 0


def fails_at(engine: ScriptedEngine, call: int, error: Exception) -> None:
    """From its `call`-th forward on, the engine raises."""
    feed = engine.feed
    calls = 0

    async def failing(session: str, position: int, ids: Sequence[int]) -> list[Pick]:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise error
        return await feed(session, position, ids)

    engine.feed = failing  # type: ignore[method-assign]
