"""What a status says when neither the client nor the models are at fault for it."""

from __future__ import annotations

import asyncio

from tests.serve_app.server import TEXT, serving
from tests.serve_app.test_telemetry import BODY, LONG, Caller, turns_until


async def test_a_client_that_leaves_is_no_server_error_in_the_counts() -> None:
    """Else alerts on 5xx go off for clients that hang up."""
    async with serving() as server:
        caller = Caller(server.app, LONG | {"stream": False})
        await turns_until(lambda: server.target_engine.num_sessions > 0)
        caller.running.cancel()  # as Serve does
        await asyncio.wait({caller.running})
        await server.driver.drain()
        [counted] = [key for key in server.sink.counts if key[0] == "outrider_requests"]
        assert not counted[2].startswith("5")


async def test_an_internal_error_tells_its_request_id_too() -> None:
    async with serving() as server:
        server.driver.open = None  # type: ignore[assignment,method-assign]
        response = await server.client.post(TEXT, json=BODY)
        assert response.status_code == 500
        assert "x-request-id" in response.headers


async def test_a_probe_gets_503_while_loading_even_if_nothing_can_say_why() -> None:
    async with serving() as server:

        async def silent() -> dict[str, str]:
            raise TimeoutError

        server.api._troubles = silent
        server.driver.models = None
        assert (await server.client.get("/ready")).status_code == 503
