"""The HTTP API over the scripted pair, in one process: no Ray, no socket."""

from __future__ import annotations

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


@pytest.fixture
def api(driver: Driver) -> Api:
    args = GraphArgs.model_validate({"http.max_body_bytes": 4096})
    return Api(driver, args.policy.session_config(), args.http)


@pytest.fixture
async def client(api: Api) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a server whose models are not loaded yet."""
    transport = httpx.ASGITransport(api.asgi(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
async def ready(client: httpx.AsyncClient, driver: Driver) -> httpx.AsyncClient:
    """A client of a server that is ready."""
    await driver.start()
    return client
