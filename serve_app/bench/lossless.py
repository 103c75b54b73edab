"""The real pair in one process: what speculation changes in the output (nothing), and in time.

Every emitted token of every run, target-only decoding included, goes through the near-tie rule.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver, GenerationRequest
from deployments.engines.llama import LlamaEngine
from deployments.verifier import CloudVerifier
from policies.events import Emit
from policies.metrics import SessionMetrics
from policies.session import SessionConfig
from policies.trigger import FixedTrigger
from policies.types import Ids, SamplingParams
from serve_app import weights
from serve_app.bench.comparison import Comparison
from serve_app.bench.near_ties import TeacherForced, compare, teacher_forced
from serve_app.bench.prompts import HUMANEVAL, all_prompts

DRAFT, TARGET = weights.DEFAULT_PAIR
CONTEXT = 1024
OFF = SessionConfig(speculate=False)


def fixed(draft_len: int) -> SessionConfig:
    """Vanilla speculative decoding with this draft length."""
    return SessionConfig(trigger=FixedTrigger(draft_len), max_window=draft_len)


@dataclass
class Tally:
    """One row of the table: a method over all prompts."""

    comparison: Comparison = field(default_factory=Comparison)
    runs: list[SessionMetrics] = field(default_factory=list)

    def total(self, counter: str) -> int:
        return sum(getattr(run, counter) for run in self.runs)

    @property
    def acceptance_rate(self) -> float | None:
        drafted = self.total("drafted")
        return self.total("accepted") / drafted if drafted else None

    @property
    def tpt_ms(self) -> list[float]:
        return [run.tpt_ms for run in self.runs if run.tpt_ms is not None]


class RealPair:
    """The default pair behind a driver in this process, and its target once more as the judge.

    To be used in one event loop, as every driver and deployment.
    """

    def __init__(self, threads: int) -> None:
        def engine(name: str) -> LlamaEngine:
            return LlamaEngine(
                weights.require(name), name=name, context=CONTEXT, max_sessions=1, threads=threads
            )

        self.engines = (engine(DRAFT), engine(TARGET))
        self.judge: TeacherForced = teacher_forced(weights.require(TARGET), CONTEXT, threads)
        self.tokenizer = self.engines[1].info.tokenizer()
        self._driver = Driver(
            EdgeDrafter(lambda: self.engines[0]),
            CloudVerifier(lambda: self.engines[1], max_window=64),
        )

    async def generate(
        self, prompt: Ids, max_tokens: int, config: SessionConfig, sampling: SamplingParams
    ) -> tuple[Ids, SessionMetrics]:
        """The ids of one request and its metrics."""
        if self._driver.models is None:
            await self._driver.start()
        sampling = replace(sampling, stop_ids=self.engines[1].info.end_ids)
        request = GenerationRequest(prompt, sampling, max_tokens, config)
        generation = self._driver.open(request)
        ids: list[int] = []
        async with aclosing(generation.stream()) as stream:
            async for item in stream:
                if isinstance(item, Emit):
                    ids.extend(item.ids)
        await self._driver.drain()  # the engines hold one session: the next run needs its place
        return tuple(ids), generation.metrics

    async def measure(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        configs: dict[str, SessionConfig],
        sampling: SamplingParams,
    ) -> dict[str, Tally]:
        """Every config over every prompt, interleaved so that a slow minute meets them all."""
        tallies = {name: Tally() for name in configs}
        for index, text in enumerate(prompts):
            prompt = tuple(self.tokenizer.encode(text))
            seeded = replace(sampling, seed=index)
            outputs: dict[Ids, Comparison] = {}
            for name, config in configs.items():
                ids, metrics = await self.generate(prompt, max_tokens, config, seeded)
                if ids not in outputs:
                    outputs[ids] = compare(self.judge, prompt, ids, seeded)
                tallies[name].comparison += outputs[ids]
                tallies[name].runs.append(metrics)
        return tallies

    def shutdown(self) -> None:
        for engine in self.engines:
            engine.shutdown()


def run(num_prompts: int = 20, max_tokens: int = 64) -> None:
    """Print the table and the JSON line."""
    threads = os.cpu_count() or 1
    pair = RealPair(threads)
    configs = {"off": OFF} | {f"k={k}": fixed(k) for k in (1, 4, 8, 16)}
    prompts = all_prompts(HUMANEVAL)[:num_prompts]
    print(f"{DRAFT} → {TARGET}, both on {threads} cores of this machine, greedy,")
    print(f"{num_prompts} odd HumanEval prompts x {max_tokens} tokens, methods interleaved;")
    print("x off: median over the prompts of TPT without speculation / TPT; above 1 is faster")
    try:
        tallies = asyncio.run(pair.measure(prompts, max_tokens, configs, SamplingParams()))
    finally:
        pair.shutdown()
    header = ("method", "tokens", "identical", "near ties", "mismatch", "accept", "len", "TPT ms")
    print(" ".join(f"{cell:>9}" for cell in (*header, "x off", "quartiles")))
    rows = [_row(name, tally, tallies["off"]) for name, tally in tallies.items()]
    result = {"benchmark": "lossless", "prompts": num_prompts, "max_tokens": max_tokens}
    print(json.dumps(result | {"rows": rows}))
    _fail_unless_lossless(tallies)


def _fail_unless_lossless(tallies: dict[str, Tally]) -> None:
    """No mismatch anywhere, and at most twice the near ties per token of target-only decoding."""
    off = tallies["off"].comparison
    allowed = 2 * off.near_ties / off.compared
    for name, tally in tallies.items():
        judged = tally.comparison
        if judged.mismatches or judged.near_ties > allowed * judged.compared:
            sys.exit(f"not lossless: {name}: {judged}, target-only: {off}")


def _row(name: str, tally: Tally, off: Tally) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(off.tpt_ms, tally.tpt_ms, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    judged, rate = tally.comparison, tally.acceptance_rate
    tpt_ms = statistics.median(tally.tpt_ms)
    length = tally.total("committed") / tally.total("rounds")
    print(
        f"{name:>9} {judged.compared:9d} {judged.identical:9d} {judged.near_ties:9d} "
        f"{judged.mismatches:9d} {'-' if rate is None else f'{rate:.3f}':>9} {length:9.2f} "
        f"{tpt_ms:9.1f} {median:9.2f} {low:.2f}–{high:.2f}"
    )
    return {
        "method": name,
        "compared": judged.compared,
        "identical": judged.identical,
        "near_ties": judged.near_ties,
        "mismatches": judged.mismatches,
        "acceptance_rate": rate,
        "acceptance_len": length,
        "tpt_ms": tpt_ms,
        "speedup": median,
    }
