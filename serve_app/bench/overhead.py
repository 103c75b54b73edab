"""What speculation itself costs: the scripted pair, whose models take no time.

Rounds of the same sessions in one process and through Ray Serve, interleaved, so that Ray's share
is seen. A round is timed between two emissions of committed tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import time
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import httpx

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver, GenerationRequest
from deployments.verifier import CloudVerifier
from policies.events import Emit
from policies.types import SamplingParams
from serve_app.config import GraphArgs

PROMPT = "once upon a time"
MAX_TOKENS = 300

# read by every Ray process when it is imported
RAY_ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def scripted_args(draft_len: int) -> GraphArgs:
    return GraphArgs.model_validate(
        {
            "draft.engine": "scripted",
            "verifier.engine": "scripted",
            "policy.draft_len": draft_len,
            "policy.max_window": max(16, draft_len),
        }
    )


async def rounds_in_process(driver: Driver, args: GraphArgs) -> list[float]:
    """Milliseconds between emissions of one request in this process."""
    request = GenerationRequest(
        tuple(PROMPT.encode()),
        SamplingParams(),
        MAX_TOKENS,
        args.policy.session_config(),
    )
    times = []
    async with aclosing(driver.open(request).stream()) as stream:
        async for item in stream:
            if isinstance(item, Emit):
                times.append(time.perf_counter())
    return _intervals_ms(times)


async def rounds_over_http(client: httpx.AsyncClient, method: str) -> list[float]:
    """Milliseconds between text chunks of one streamed request; a chunk is a round."""
    body = {
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "outrider": {"method": method},
    }
    times = []
    async with client.stream("POST", "/v1/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return _intervals_ms(times[:-1])  # the last chunk brings no token


async def measure(repeats: int, draft_len: int) -> dict[str, list[float]]:
    """Intervals of every path, interleaved `repeats` times."""
    os.environ |= RAY_ENV
    import ray
    from ray import serve

    from serve_app.app import draft_engine, graph, target_engine

    args = scripted_args(draft_len)
    window = args.policy.chosen().max_window
    driver = Driver(
        EdgeDrafter(draft_engine(args)), CloudVerifier(target_engine(args), max_window=window)
    )
    await driver.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, namespace="serve", log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(graph(args), route_prefix="/")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            await _until_ready(client)
            await rounds_over_http(client, "speculative")  # warm
            samples: dict[str, list[float]] = {"in process": [], "Ray Serve": [], "off": []}
            for _ in range(repeats):
                samples["in process"] += await rounds_in_process(driver, args)
                samples["Ray Serve"] += await rounds_over_http(client, "speculative")
                samples["off"] += await rounds_over_http(client, "off")
    finally:
        serve.shutdown()
        ray.shutdown()
    return samples


def run(repeats: int = 15, draft_len: int = 4) -> None:
    """Print the table and the JSON line."""
    samples = asyncio.run(measure(repeats, draft_len))
    print(f"overhead of a round, scripted pair at zero model time, draft length {draft_len},")
    print(f"{repeats} interleaved requests of {MAX_TOKENS} tokens per path, {os.cpu_count()} cores")
    print(f"{'path':<36} {'p50 ms':>8} {'p25':>8} {'p75':>8} {'p95':>8} {'rounds':>8}")
    names = {
        "in process": "speculative, one process",
        "Ray Serve": "speculative, Ray Serve",
        "off": "no speculation, Ray Serve, a token",
    }
    result: dict[str, Any] = {"benchmark": "overhead", "draft_len": draft_len}
    for key, values in samples.items():
        quarter = statistics.quantiles(values, n=20)
        median = statistics.median(values)
        cells = (median, quarter[4], quarter[14], quarter[18])
        print(f"{names[key]:<36} " + " ".join(f"{c:8.2f}" for c in cells) + f" {len(values):8d}")
        result[key.replace(" ", "_").lower() + "_round_ms"] = round(median, 3)
    print(json.dumps(result))


async def _until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        if (await client.get("/ready")).status_code == 200:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the graph did not become ready within a minute")


def _intervals_ms(times: list[float]) -> list[float]:
    return [(later - earlier) * 1000.0 for earlier, later in pairwise(times)]
