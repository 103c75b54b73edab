"""The HTTP API over the scripted pair, in one process: no Ray, no socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator

import httpx
import pytest

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver
from deployments.engines.scripted import ScriptedEngine, ToyModel
from deployments.verifier import CloudVerifier
from serve_app.api import Api
from serve_app.config import GraphArgs

TARGET = ToyModel(seed=0, agreement=1.0, end_every=0)


@pytest.fixture
def driver() -> Driver:
    return Driver(
        EdgeDrafter(lambda: ScriptedEngine(ToyModel(0, 0.8), context=256)),
        CloudVerifier(
            lambda: ScriptedEngine(TARGET, name="toy-target", context=256), max_window=16
        ),
    )


class Recorder:
    """A MetricsSink that keeps sums of counts, lists of observations and the last gauge values."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.observed: dict[str, list[float]] = {}
        self.gauges: dict[str, float] = {}

    def add(self, name: str, value: float, **tags: str) -> None:
        self.counts[(name, *tags.values())] += value  # type: ignore[assignment]

    def observe(self, name: str, value: float) -> None:
        self.observed.setdefault(name, []).append(value)

    def set(self, name: str, value: float) -> None:
        self.gauges[name] = value


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


@pytest.fixture
def api(driver: Driver, sink: Recorder) -> Api:
    args = GraphArgs.model_validate({"http.max_body_bytes": 4096})
    return Api(driver, args.policy.session_config(), args.http, sink=sink)


@pytest.fixture
async def client(api: Api) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a server whose models are not loaded yet."""
    transport = httpx.ASGITransport(api.asgi(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
async def ready(client: httpx.AsyncClient, driver: Driver) -> httpx.AsyncClient:
    """A client of a server that is ready."""
    await driver.start()
    return client
