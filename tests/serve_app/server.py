"""The endpoint over scripted pairs of the test's choice, and answers read back in either mode."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx
import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray

from deployments.drafter import EdgeDrafter
from deployments.driver import Driver
from deployments.engines.protocol import Tokenizer
from deployments.engines.scripted import END_ID, VOCABULARY, ByteTokenizer, ScriptedEngine, ToyModel
from deployments.verifier import CloudVerifier
from policies.types import SamplingParams
from serve_app.api import Api
from serve_app.config import GraphArgs
from tests.serve_app.conftest import TARGET, Recorder
from tests.serve_app.test_api import events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
CANARY = bytes(TARGET.write(b"canary", 8, SamplingParams())).decode()


class Model(Protocol):
    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Server:
    api: Api
    app: FastAPI
    driver: Driver
    sink: Recorder
    client: httpx.AsyncClient
    target_engine: ScriptedEngine


@asynccontextmanager
async def serving(
    target: Model = TARGET,
    draft: Model | None = None,
    *,
    words: tuple[bytes, ...] = (),
    tokenizer: Callable[[], Tokenizer] | None = None,
    key_digests: tuple[bytes, ...] = (),
    base_url: str = "http://127.0.0.1",
    **config: Any,
) -> AsyncGenerator[Server, None]:
    """A server that is ready. `words` are ids beyond the bytes; `config` is by dotted key."""

    def engine(model: Model) -> ScriptedEngine:
        made = ScriptedEngine(model, name="toy-target", context=256)  # type: ignore[arg-type]
        made.info = replace(
            made.info,
            vocabulary=(*VOCABULARY, *words),
            tokenizer=tokenizer or (lambda: WordTokenizer(words)),
        )
        return made

    target_engine = engine(target)
    driver = Driver(
        EdgeDrafter(lambda: engine(draft or ToyModel(0, 0.8))),
        CloudVerifier(lambda: target_engine, max_window=64),
    )
    args = GraphArgs.model_validate({"policy.max_window": 64} | config)
    sink = Recorder()
    session_config = args.policy.session_config()
    api = Api(
        driver, session_config, args.http, sink=sink, policy=args.policy, key_digests=key_digests
    )
    app = api.asgi()
    await driver.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
        yield Server(api, app, driver, sink, client, target_engine)


class WordTokenizer(ByteTokenizer):
    """Bytes, and from id 257 on words of several bytes each."""

    def __init__(self, words: tuple[bytes, ...]) -> None:
        self._words = words

    def token_bytes(self, token_id: int) -> bytes:
        beyond = token_id - END_ID - 1
        return super().token_bytes(token_id) if beyond < 0 else self._words[beyond]


@dataclass(frozen=True)
class Script:
    """A model of `size` ids that writes these after a prompt of one id, and then the end id.

    Every `wrong_every`-th one is another id, as of a draft that errs.
    """

    ids: tuple[int, ...]
    size: int
    wrong_every: int = 0

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        at = len(ids) - 1
        wrong = self.wrong_every > 0 and at % self.wrong_every == self.wrong_every - 1
        row = np.full(self.size, -50.0, dtype=np.float32)
        row[END_ID if at >= len(self.ids) else (self.ids[at] + wrong) % self.size] = 0.0
        return row


@asynccontextmanager
async def writing(
    written: bytes | Sequence[bytes], draft_len: int = 4, wrong_every: int = 0
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A server whose target writes these bytes, or words, after any prompt of one byte."""
    words = () if isinstance(written, bytes) else tuple(dict.fromkeys(written))
    ids = [w if isinstance(w, int) else END_ID + 1 + words.index(w) for w in written]
    script = Script(tuple(ids), len(VOCABULARY) + len(words))
    draft = replace(script, wrong_every=wrong_every)
    async with serving(script, draft, words=words, **{"policy.draft_len": draft_len}) as server:
        yield server.client


@dataclass
class Told:
    """What one choice was told, in a stream or as a whole."""

    text: str = ""
    reason: str | None = None
    ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()


def ids_of(choice: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(token["id"] for token in choice.get("outrider", {}).get("tokens", ()))


def logprobs_of(choice: Mapping[str, Any]) -> tuple[Any, ...]:
    """One entry per token, in either endpoint's format."""
    told = choice["logprobs"]
    if told is None:
        return ()
    if "content" in told:
        return tuple(told["content"])
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return tuple(zip(*(told[column] for column in columns), strict=True))


async def whole(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> tuple[list[Told], dict[str, Any]]:
    """The choices of a whole answer, and its usage."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    told = []
    for choice in answer["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        told.append(Told(text, choice["finish_reason"], ids_of(choice), logprobs_of(choice)))
    return told, answer["usage"]


async def streamed(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> tuple[list[Told], dict[str, Any]]:
    """The choices of a stream put together, and its usage; checks the form of every chunk."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *data, done = await events(client, path, body)
    assert done == "[DONE]"
    *chunks, last = [json.loads(chunk) for chunk in data]
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    frames = {(c["id"], c["object"], c["model"], c["created"]) for c in [*chunks, last]}
    assert len(frames) == 1
    assert ["outrider" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    told: dict[int, Told] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        first = choice["index"] not in told
        one = told.setdefault(choice["index"], Told())
        assert one.reason is None, "a chunk after the choice's finish reason"
        if path == CHAT:
            assert choice["delta"].get("role") == ("assistant" if first else None)
        one.text += choice["delta"].get("content", "") if path == CHAT else choice["text"]
        one.reason = choice["finish_reason"]
        one.ids += ids_of(choice)
        one.logprobs += logprobs_of(choice)
    return [told[index] for index in sorted(told)], last["usage"]


async def assert_still_right(client: httpx.AsyncClient) -> None:
    """The canary of a server with the usual target: the next request is answered as ever."""
    body = {"prompt": "canary", "max_tokens": 8, "temperature": 0}
    [told], usage = await whole(client, TEXT, body)
    assert told.text == CANARY
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 8)


async def post_raw(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    """The answer to a body of JSON, or of bytes or text as they are; a canary follows."""
    content = body if isinstance(body, bytes | str) else json.dumps(body)
    response = await client.post(path, content=content, headers=JSON)
    await assert_still_right(client)
    return response


async def assert_refused(
    client: httpx.AsyncClient, path: str, body: Any, param: str | None, said: str = ""
) -> None:
    """An OpenAI error object that names the field, of bounded length; a canary follows."""
    response = await post_raw(client, path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert (said or param or "") in error["message"]
    assert "Traceback" not in error["message"]
    assert len(response.content) < 3000  # whatever was sent, little of it comes back
