"""Generations that are abandoned leave nothing behind, at whatever moment."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress

import pytest

from deployments.driver import GenerationRequest
from policies.session import SessionConfig
from policies.trigger import FixedTrigger
from policies.types import SamplingParams
from tests.deployments.pair import PROMPT, Pair

CONFIGS = (
    SessionConfig(trigger=FixedTrigger(4), max_window=4),
    SessionConfig(
        trigger=FixedTrigger(2), max_window=16, max_navs_in_flight=4, draft_while_waiting=True
    ),
    SessionConfig(speculate=False),
)


@pytest.mark.parametrize("max_sessions", [2, 64])
async def test_500_generations_cancelled_at_random_moments_hold_no_place(max_sessions: int) -> None:
    """Before the first event, between two, in a place's queue, or by cancelling whoever awaits."""
    rng = random.Random(max_sessions)
    pair = Pair(max_sessions=max_sessions)
    await pair.driver.start()

    async def abandon(turns: int, items: int) -> None:
        config = rng.choice(CONFIGS)
        request = GenerationRequest(PROMPT, SamplingParams(), 2_000, config)
        generation = pair.driver.open(request)

        async def read() -> None:
            async with aclosing(generation.stream()) as stream:
                left = items
                async for _ in stream:
                    left -= 1
                    if not left:
                        return

        reading = asyncio.create_task(read())
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    for _ in range(50):
        jobs = [abandon(rng.randrange(0, 200), rng.randrange(1, 30)) for _ in range(10)]
        await asyncio.gather(*jobs)
    await pair.assert_nothing_is_left()
    result = await pair.generate()
    assert result.ids == pair.alone()
