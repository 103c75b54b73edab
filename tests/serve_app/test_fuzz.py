"""Schemathesis against the endpoint's own OpenAPI document: nothing it thinks of is a 5xx."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from serve_app.api import Api
from tests.serve_app.server import CHAT, TEXT, serving

CALLS = 500  # per endpoint and mode: 2,000 in all


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_no_request_is_a_server_error(path: str, mode: schemathesis.GenerationMode) -> None:
    """With data that keeps the schema, and with data that breaks it."""
    statuses: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        entered = serving()
        server = runner.run(entered.__aenter__())
        operation = schemathesis.openapi.from_dict(server.app.openapi())[path]["POST"]

        @seed(3)
        @settings(
            max_examples=CALLS,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(mode))
        def call(case: schemathesis.Case) -> None:
            response = runner.run(send(server.client, case))
            statuses[response.status_code] += 1
            assert response.status_code < 500, (case.body, response.text)
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        call()
        runner.run(entered.__aexit__(None, None, None))
    print(path, mode.value, dict(statuses))
    assert sum(statuses.values()) >= CALLS
    assert statuses[200] if mode is schemathesis.GenerationMode.POSITIVE else statuses[400]


async def send(client: httpx.AsyncClient, case: schemathesis.Case) -> httpx.Response:
    request = case.as_transport_kwargs(base_url=str(client.base_url))
    body = request["data"] if "data" in request else json.dumps(request.get("json")).encode()
    return await client.request(
        request["method"],
        request["url"],
        params=request["params"],
        headers={"Content-Type": "application/json", **request["headers"]},
        content=body,
    )


@pytest.mark.parametrize("defect", [None, "the vocabularies differ"])
async def test_a_server_that_is_not_ready_answers_as_its_document_says(
    api: Api, client: httpx.AsyncClient, defect: str | None
) -> None:
    api.defect = defect
    schema = schemathesis.openapi.from_dict(api.asgi().openapi())
    for path, method in (("/ready", "GET"), ("/v1/models", "GET"), (CHAT, "POST"), (TEXT, "POST")):
        body = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
        response = await client.request(method, path, json=body if method == "POST" else None)
        assert response.status_code == 503
        schema[path][method].validate_response(response)
