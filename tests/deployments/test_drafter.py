"""EdgeDrafter: what it drafts, and what it lets go, when it is steered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from deployments.drafter import EdgeDrafter
from deployments.engines.scripted import ScriptedEngine, ToyModel
from policies.events import GrantDraft, RewindDrafter
from policies.types import Pick, SamplingParams

PROMPT = (5, 6, 7)


class SlowEngine(ScriptedEngine):
    """The toy engine; from the call `stuck_from` on, a feed takes until it is cancelled."""

    def __init__(self, stuck_from: int) -> None:
        super().__init__(ToyModel())
        self.stuck_from, self.calls = stuck_from, 0
        self.entered = asyncio.Event()

    async def feed(self, session: str, position: int, ids: Sequence[int]) -> list[Pick]:
        self.calls += 1
        if self.calls == self.stuck_from:
            self.entered.set()
            await asyncio.Event().wait()
        return await super().feed(session, position, ids)


async def test_a_draft_step_behind_a_rewind_is_broken_off() -> None:
    """The drafter goes on from the target's token without waiting for a step that is in vain."""
    engine = SlowEngine(stuck_from=3)
    drafter = EdgeDrafter(lambda: engine)
    sampling = SamplingParams()
    async with aclosing(drafter.open("s", PROMPT, sampling, GrantDraft(0, 3, 8))) as drafts:
        first = [await anext(drafts), await anext(drafts)]
        following = asyncio.ensure_future(anext(drafts))
        await engine.entered.wait()
        kept = (*PROMPT, first[0].id, 9)
        await drafter.steer("s", RewindDrafter(1, 4, (9,)), GrantDraft(1, 5, 2))
        token = await following
        assert (token.epoch, token.position) == (1, 5)
        after = await anext(drafts)
    model = ToyModel()
    assert (token.id, after.id) == model.write(kept, 2, sampling)
    assert drafter.num_sessions == 0


async def test_leaving_while_a_draft_step_runs_frees_the_place() -> None:
    engine = SlowEngine(stuck_from=2)
    drafter = EdgeDrafter(lambda: engine)
    drafts = drafter.open("s", PROMPT, SamplingParams(), GrantDraft(0, 3, 8))
    await anext(drafts)
    following = asyncio.ensure_future(anext(drafts))
    await engine.entered.wait()
    following.cancel()
    await asyncio.wait([following])
    assert following.cancelled()
    await drafts.aclose()
    assert (drafter.num_sessions, engine.num_sessions) == (0, 0)
