"""What operators see of every request, however it ends, and that it leaves nothing open."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver
from deployments.engines.protocol import EngineError
from deployments.engines.scripted import ScriptedEngine
from deployments.verifier import CloudVerifier
from serve_app.api import Api
from serve_app.config import GraphArgs
from tests.serve_app.conftest import TARGET, Recorder
from tests.serve_app.server import CHAT, TEXT, Server, serving

BODY = {"prompt": "secret prompt", "max_tokens": 20, "temperature": 0}
LONG = BODY | {"max_tokens": 200, "stream": True}


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "serve_app.telemetry"]


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until it holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never held")


class Caller:
    """One request by bare ASGI: what was sent, a reader that may pause, a client that may leave.

    With `gone` the client is not there at the first send. With `by_error` the server does not say
    that the client left, but fails, as Serve does at times.
    """

    def __init__(
        self, app: FastAPI, body: dict[str, Any], gone: bool = False, by_error: bool = False
    ) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.reads, self.leaves, self.arrived = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.reads.set()
        self._body = json.dumps(body).encode()
        self._asked, self._gone, self._by_error = False, gone, by_error
        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.4" if gone else "2.3"},  # only 2.4 tells it by the send
            "method": "POST",
            "path": TEXT,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "server": ("127.0.0.1", 80),
        }
        self.running = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.leaves.wait()
        if self._by_error:
            raise RuntimeError("Task was cancelled")
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self._gone:
            raise OSError("the client is gone")
        self.sent.append(message)
        self.arrived.set()
        await self.reads.wait()


@pytest.mark.parametrize("given", ["abc-1.2:3_4", "x" * 128])
async def test_a_plain_request_id_is_kept_and_left_to_whoever_gave_it(
    given: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve's proxy gives one to every request, and tells it in the response itself."""
    caplog.set_level(logging.INFO)
    async with serving() as server:
        response = await server.client.post(TEXT, json=BODY, headers={"x-request-id": given})
    assert "x-request-id" not in response.headers
    [line] = lines(caplog)
    assert line.__dict__["request_id"] == given


@pytest.mark.parametrize(
    "given",
    [None, "", "two words", "x" * 129, "x" * 200, "é", "a\tb", "a\n", "a\r\nb: c", '{"a":1}'],
)
async def test_without_a_plain_request_id_one_is_made_and_told(
    given: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = {} if given is None else {"x-request-id": given.encode()}
    async with serving() as server:
        response = await server.client.post(TEXT, json=BODY, headers=headers)  # type: ignore[arg-type]
    [line] = lines(caplog)
    assert line.__dict__["request_id"] == response.headers["x-request-id"]
    assert response.headers["x-request-id"] != given


async def test_one_line_says_how_an_answer_went_and_never_what_it_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as server:
        response = await server.client.post(TEXT, json=BODY | {"n": 2})
        for path in ("/health", "/ready"):
            await server.client.get(path)
    answer = response.json()
    [line] = lines(caplog)
    told = line.__dict__
    assert {name: told[name] for name in answer["outrider"]} == answer["outrider"]
    assert (told["outcome"], told["mode"], told["status"]) == ("finished", "speculative", 200)
    assert told["answer"] == answer["id"]
    assert len(set(told["sessions"])) == 2
    assert told["completion_tokens"] == answer["usage"]["completion_tokens"] == 40
    for text in ("secret", *(choice["text"] for choice in answer["choices"])):
        assert text not in caplog.text
        assert text not in str(told)


async def test_counts_add_up_to_what_the_answers_report() -> None:
    async with serving() as server:
        answers = [(await server.client.post(TEXT, json=BODY | {"n": n})).json() for n in (1, 3)]
        await server.client.get("/v9/nothing")
        await server.client.get("/v9/nothing/else")
    counts = server.sink.counts
    for origin in ("accepted", "recovered", "bonus"):
        reported = sum(answer["outrider"][origin] for answer in answers)
        assert counts["outrider_tokens", origin] == reported
    for name in ("navs", "uplink_bytes", "downlink_bytes"):
        assert counts[f"outrider_{name}",] == sum(a["outrider"][name] for a in answers)
    prompts = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert counts["outrider_prompt_tokens",] == prompts
    assert counts["outrider_requests", TEXT, "200"] == 2
    assert counts["outrider_requests", "other", "404"] == 2
    assert len(server.sink.observed["outrider_ttft_ms"]) == 2


async def test_what_never_reaches_its_route_counts_for_it_all_the_same() -> None:
    """A body that is too large, a missing key, a wrong method."""
    async with serving(**{"http.max_body_bytes": 1024}) as server:
        await server.client.post(TEXT, content=b"x" * 2000)
        await server.client.get(TEXT)
        await server.client.get("/v1/models/a/b")
        counts = server.sink.counts
        assert counts["outrider_requests", TEXT, "413"] == 1
        assert counts["outrider_requests", TEXT, "405"] == 1
        assert counts["outrider_requests", "/v1/models/{model:path}", "404"] == 1
    async with serving(base_url="http://192.0.2.7") as server:
        await server.client.post(CHAT, json=BODY)
        assert server.sink.counts["outrider_requests", CHAT, "401"] == 1


async def test_a_client_that_leaves_before_its_body_is_whole_has_asked_nothing() -> None:
    async with serving() as server:
        parts = iter(
            [
                {"type": "http.request", "body": b'{"prompt":', "more_body": True},
                {"type": "http.disconnect"},
            ]
        )
        sent: list[Any] = []

        async def receive() -> Any:
            return next(parts)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": TEXT,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "server": ("127.0.0.1", 80),
        }
        await server.app(scope, receive, send)
        assert sent == []
        assert server.sink.counts["outrider_requests", TEXT, "499"] == 1
        assert server.sink.counts["outrider_cancelled",] == 0


async def assert_all_is_over(server: Server) -> None:
    await server.driver.drain()
    assert server.sink.gauges["outrider_open_sessions"] == 0
    assert server.target_engine.num_sessions == 0
    answer = (await server.client.post(TEXT, json=BODY)).json()
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_answer_is_counted_and_over(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as server:
        feed = server.target_engine.feed

        async def failing(*_: object) -> list[Any]:
            raise EngineError("logits are not finite")

        server.target_engine.feed = failing  # type: ignore[method-assign]
        await server.client.post(TEXT, json=BODY | {"stream": stream, "n": 3})
        server.target_engine.feed = feed  # type: ignore[method-assign]
        assert server.sink.counts["outrider_failed",] == 1
        assert [line.__dict__["outcome"] for line in lines(caplog)] == ["failed"]
        assert "secret" not in caplog.text + str(lines(caplog)[0].__dict__)
        await assert_all_is_over(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_in_the_wording_is_told_and_counted_as_a_failure(
    stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's last event is an error, and no [DONE] follows."""
    caplog.set_level(logging.INFO)

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    async with serving() as server:
        with monkeypatch.context() as patch:
            patch.setattr("serve_app.answer._detailed", broken)
            body = BODY | {"stream": stream, "outrider": {"tokens": True}}
            response = await server.client.post(TEXT, json=body)
        told = response.text.strip().rpartition("data: ")[2] if stream else response.text
        assert json.loads(told)["error"]["message"] == "internal error"
        assert response.status_code == (200 if stream else 500)
        assert server.sink.counts["outrider_failed",] == 1
        assert server.sink.counts["outrider_cancelled",] == 0
        assert [line.__dict__["outcome"] for line in lines(caplog)] == ["failed"]
        await assert_all_is_over(server)


@pytest.mark.parametrize("body", [{"prompt": ""}, {"prompt": "a", "n": 0}, {"prompt": [999]}])
async def test_a_refused_request_opens_nothing(body: dict[str, Any]) -> None:
    async with serving() as server:
        assert (await server.client.post(TEXT, json=body)).status_code == 400
        assert "outrider_open_sessions" not in server.sink.gauges
        await server.client.post(CHAT, json=body)
        await server.client.post(TEXT, json=BODY)
        await assert_all_is_over(server)


@pytest.mark.parametrize("by_error", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 7])
async def test_a_client_that_leaves_is_counted_as_cancelled_and_leaves_nothing(
    chunks: int, by_error: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With 0 it is gone before the response begins."""
    caplog.set_level(logging.INFO)
    async with serving() as server:
        caller = Caller(server.app, LONG, by_error=by_error)
        if not chunks:
            caller.leaves.set()
        await turns_until(lambda: len(caller.sent) >= chunks)
        caller.leaves.set()
        await caller.running
        assert server.sink.counts["outrider_cancelled",] == 1
        assert [line.__dict__["outcome"] for line in lines(caplog)] == ["cancelled"]
        assert [record for record in caplog.records if record.levelno > logging.INFO] == []
        await assert_all_is_over(server)


async def test_a_stream_that_never_began_leaves_nothing() -> None:
    async with serving() as server:
        with suppress(ClientDisconnect):
            await Caller(server.app, LONG, gone=True).running
        assert server.sink.counts["outrider_cancelled",] == 1
        await assert_all_is_over(server)


async def test_drafter_and_verifier_tell_how_many_sessions_they_hold() -> None:
    drafting: list[int] = []
    verifying: list[int] = []
    drafter = EdgeDrafter(lambda: ScriptedEngine(TARGET), on_sessions=drafting.append)
    verifier = CloudVerifier(
        lambda: ScriptedEngine(TARGET), max_window=64, on_sessions=verifying.append
    )
    driver, args = Driver(drafter, verifier), GraphArgs()
    await driver.start()
    app = Api(driver, args.policy.session_config(), args.http, sink=Recorder()).asgi()
    leaver, reader = (Caller(app, LONG | {"n": 2}) for _ in range(2))
    await leaver.arrived.wait()
    leaver.leaves.set()
    await asyncio.gather(leaver.running, reader.running)
    await driver.drain()
    for told in (drafting, verifying):
        assert max(told) == 4
        assert told[-1] == 0


async def test_a_cancelled_whole_answer_leaves_nothing() -> None:
    """Serve cancels the task of a request whose client left."""
    async with serving() as server:
        caller = Caller(server.app, LONG | {"stream": False, "n": 4})
        await turns_until(lambda: server.target_engine.num_sessions > 0)
        caller.running.cancel()
        with suppress(asyncio.CancelledError):
            await caller.running
        assert server.sink.counts["outrider_cancelled",] == 1
        await assert_all_is_over(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_too_much_gets_503_before_any_event_until_a_session_ends(
    stream: bool,
) -> None:
    """C50: two streams whose readers pause fill the server."""
    async with serving(**{"http.max_sessions": 2, "http.max_choices": 2}) as server:
        paused = [Caller(server.app, LONG) for _ in range(2)]
        for caller in paused:
            caller.reads.clear()
            await caller.arrived.wait()
        refused = await server.client.post(TEXT, json=BODY | {"stream": stream})
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/json"
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) > 0
        assert server.sink.gauges["outrider_open_sessions"] == 2
        paused[0].reads.set()
        await paused[0].running
        accepted: httpx.Response = await server.client.post(TEXT, json=BODY | {"stream": stream})
        assert accepted.status_code == 200
        paused[1].reads.set()
        await paused[1].running
        assert [caller.sent[0]["status"] for caller in paused] == [200, 200]
        assert all(caller.sent[-2]["body"].endswith(b"[DONE]\n\n") for caller in paused)
        await assert_all_is_over(server)
