"""What deciding costs: all control of a drafted token, for every method, and PipeSD's schedule.

The ceiling is a draft step of 36 ms; the baseline a session whose plan never changes.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time

import numpy as np

from policies.control import (
    Answered,
    Committed,
    Constant,
    Control,
    DecodedOn,
    Drafted,
    Judged,
    NavSent,
    RoundEnded,
)
from policies.controller import Controller, Learned
from policies.costs import LinkCosts
from policies.methods import METHODS
from policies.token_batches import BatchCosts
from policies.token_batches import plan as schedule
from policies.trigger import DraftSignal, fires

DRAFT_STEP_MS = 36.0
WARM_UP, MEASURED = 2_000, 20_000  # drafted tokens
NUM_TOKENS = 20  # of a schedule


def control_us(control: Control, learned: Learned | None, num_drafts: int) -> list[float]:
    """Microseconds per drafted token, of each NAV: plan, trigger, and all that is learned from it.

    The tuner's Gaussian process, which the driver fits in a thread, is left out.
    """
    rng = np.random.default_rng(0)
    confidences = (1.0 - rng.random(num_drafts) ** 3).tolist()
    luck = rng.random(num_drafts).tolist()
    draft_ms = (DRAFT_STEP_MS * rng.lognormal(0.0, 0.1, num_drafts)).tolist()
    samples: list[float] = []
    at, now_ms = 0, 0.0
    while at < num_drafts:
        drafts: list[DraftSignal] = []
        began = time.perf_counter()
        plan = control.plan()
        if plan.decode_on:
            now_ms = _decode_on(control, plan.decode_on, now_ms)
            continue
        while at < num_drafts:
            control.observe(Drafted(draft_ms[at]))
            drafts.append(DraftSignal(confidences[at], 0.5))
            at += 1
            if fires(plan.trigger, drafts):
                break
        count = len(drafts)
        stand = [luck[at - count + i] < drafts[i].confidence ** 0.3 for i in range(count)]
        accepted = next((i for i, stands in enumerate(stand) if not stands), count)
        now_ms += DRAFT_STEP_MS * count + 80.0
        control.observe(NavSent(count))
        for i in range(min(accepted + 1, count)):
            control.observe(Judged(drafts[i], i, i < accepted))
        control.observe(Committed(accepted + 1, now_ms))
        control.observe(
            Answered(80.0 + luck[at - 1], count, count + 1, 30.0, count, accepted, True)
        )
        control.observe(RoundEnded(count, DRAFT_STEP_MS * count + 80.0, accepted + 1))
        samples.append((time.perf_counter() - began) * 1e6 / count)
        if learned is not None and learned.setting_due:
            learned.choose_setting()
    return samples


def _decode_on(control: Control, count: int, began_ms: float) -> float:
    """A stretch of the target's own tokens; when it ends."""
    control.observe(NavSent(0))
    now_ms = began_ms + 80.0
    control.observe(Committed(1, now_ms))
    for _ in range(count - 1):
        now_ms += 30.0
        control.observe(Committed(1, now_ms))
        control.observe(DecodedOn(30.0, 30.0))
    control.observe(RoundEnded(0, now_ms - began_ms, count))
    return now_ms


def schedule_us() -> tuple[float, float]:
    """Microseconds of a schedule of NUM_TOKENS tokens, planned anew and from the cache; medians."""
    link = LinkCosts(rtt_ms=50.0, overhead_ms=1.0, ms_per_byte=0.004)
    anew: list[float] = []
    cached: list[float] = []
    for i in range(2_000):
        costs = BatchCosts.persistent(DRAFT_STEP_MS + i * 1e-6, link, 4, 96)
        for samples in (anew, cached):
            began = time.perf_counter()
            schedule(NUM_TOKENS, costs)
            samples.append((time.perf_counter() - began) * 1e6)
    return statistics.median(anew), statistics.median(cached)


def run() -> None:
    """Print the table and the JSON line."""
    print(f"control per drafted token, one of {os.cpu_count()} cores, Python", end=" ")
    print(f"{platform.python_version()}, {MEASURED} drafts; a draft step is {DRAFT_STEP_MS:g} ms")
    head = f"{'method':<20} {'mean us':>8} {'p50':>8} {'p99 of a NAV':>13}"
    print(f"{head} {'% of a draft step':>18}")
    result: dict[str, float | str] = {"benchmark": "control"}
    slowest = 0.0
    for name in ("constant plan", *METHODS):
        learned = None if name == "constant plan" else Learned(METHODS[name])
        control: Control = (
            Constant(METHODS["vanilla"].session_config().plan)
            if learned is None
            else Controller(learned)
        )
        control_us(control, learned, WARM_UP)
        samples = control_us(control, learned, MEASURED)
        mean = statistics.fmean(samples)
        p99 = statistics.quantiles(samples, n=100)[98]
        share = mean / (DRAFT_STEP_MS * 10.0)
        print(f"{name:<20} {mean:8.1f} {statistics.median(samples):8.1f} {p99:13.1f} {share:18.3f}")
        result[name.replace(" ", "_")] = round(mean, 2)
        slowest = max(slowest, mean)
    anew, cached = schedule_us()
    print(f"schedule of {NUM_TOKENS} tokens: {anew:.0f} us anew, {cached:.2f} us from the cache")
    result |= {"slowest_us": round(slowest, 2), "schedule_us": round(anew, 1)}
    result["cached_schedule_us"] = round(cached, 3)
    print(json.dumps(result))
