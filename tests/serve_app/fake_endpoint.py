"""A fake endpoint: a toy target behind the HTTP contract, on a virtual clock, without a socket.

The vocabulary is `w1` to `w29` and the end token 0. The target alone continues ids by their sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from openai import OpenAI

from serve_app import client

VOCABULARY = 30
END = 0
URL = "http://toy:8000"
Body = dict[str, Any]


@dataclass
class VirtualClock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def best(ids: Sequence[int]) -> int:
    """The target's own next id."""
    return 1 + (sum(ids) * 7 + len(ids)) % (VOCABULARY - 1)


def written(ids: Sequence[int], count: int) -> list[int]:
    """The next ids of the target alone."""
    result: list[int] = []
    for _ in range(count):
        result.append(best([*ids, *result]))
    return result


def ids_of(text: str) -> list[int]:
    return [1 + ord(character) % (VOCABULARY - 1) for character in text]


def text_of(token_id: int) -> str:
    return "" if token_id == END else f"w{token_id} "


def report(mode: str = "speculative", **figures: Any) -> Body:
    """The endpoint's figures of one answer, as the contract has them."""
    counts = ("rounds", "navs", "drafted", "accepted", "recovered", "bonus", "resends", "reopens")
    zero = dict.fromkeys((*counts, "uplink_bytes", "downlink_bytes"), 0)
    rates = {"acceptance_rate": None, "acceptance_len": None, "tpt_ms": 10.0, "ttft_ms": 50.0}
    lists: Body = {"accepted_at": [], "judged_at": []}
    return {"mode": mode, "verify_ms": 1.0} | zero | rates | lists | figures


@dataclass
class FakeEndpoint:
    """The requests it saw, in order, and what it does with them."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    chunk_tokens: int = 3  # of a speculative chunk; the target alone sends one
    first_s: float = 0.2
    next_s: float = 0.1
    # the id after these, with speculation; the target's own unless a test says otherwise
    emit: Callable[[Sequence[int]], int] = best
    gap: float = 5.0  # logits between the target's best id and every other
    figures: Body = field(default_factory=dict)
    fail: Callable[[Body], httpx.Response | None] = lambda _body: None
    requests: list[Body] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "toy-target"}]})
        body = json.loads(request.content) | {"path": request.url.path}
        self.requests.append(body)
        failure = self.fail(body)
        if failure is not None:
            return failure
        if body.get("stream"):
            events = self._events(body)
            return httpx.Response(
                200, headers={"content-type": "text/event-stream"}, content=events
            )
        return httpx.Response(200, json=self._whole(body))

    @property
    def methods(self) -> list[str]:
        """Of the streamed requests."""
        return [body["outrider"]["method"] for body in self.requests if body.get("stream")]

    def prompt_ids(self, body: Body) -> list[int]:
        if "messages" in body:
            return ids_of(body["messages"][-1]["content"])
        return ids_of(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]

    def _answer(self, body: Body) -> list[int]:
        prompt, result = self.prompt_ids(body), []
        alone = body["outrider"]["method"] == "off"
        while len(result) < (body["max_tokens"] or 8) and result[-1:] != [END]:
            before = [*prompt, *result]
            result.append(best(before) if alone else self.emit(before))
        return result

    def _events(self, body: Body) -> Iterator[bytes]:
        ids, chat = self._answer(body), "messages" in body
        alone = body["outrider"]["method"] == "off"
        size = 1 if alone else self.chunk_tokens
        if chat:
            yield _event({"delta": {"role": "assistant", "content": ""}})
        self.clock.now_s += self.first_s
        for start in range(0, len(ids), size):
            if start:
                self.clock.now_s += self.next_s
            sent = ids[start : start + size]
            text = "".join(text_of(token_id) for token_id in sent)
            content = {"delta": {"content": text}} if chat else {"text": text}
            yield _event(content | {"outrider": {"tokens": [self._token(i, alone) for i in sent]}})
        self.clock.now_s += 7.0  # what comes after the last token belongs to no time
        end = {"delta": {}} if chat else {"text": ""}
        extension = {"tokens": [], "prompt_ids": self.prompt_ids(body)}
        figures = report("off") if alone else report() | self.figures
        choice = end | {"outrider": extension, "finish_reason": "length"}
        yield _event(choice, outrider=figures)
        yield b"data: [DONE]\n\n"

    def _token(self, token_id: int, alone: bool) -> Body:
        origin = "bonus" if alone else "accepted"
        return {"id": token_id, "text": text_of(token_id), "origin": origin}

    def _whole(self, body: Body) -> Body:
        prompt, ids = self.prompt_ids(body), self._answer(body)
        tokens = [self._token(token_id, alone=True) for token_id in ids]
        if body.get("logprobs"):
            own = ids[0]
            others = [1 + (own + i) % (VOCABULARY - 1) for i in range(4)]
            top = [{"id": own, "logprob": -0.5}]
            top += [{"id": other, "logprob": -0.5 - self.gap} for other in others]
            tokens[0] |= {"logprob": -0.5, "top": top}
        text = "".join(text_of(token_id) for token_id in ids)
        extension = {"tokens": tokens, "prompt_ids": prompt}
        choice = {"index": 0, "text": text, "finish_reason": "length", "outrider": extension}
        return {"id": "cmpl-1", "object": "text_completion", "model": "toy-target"} | {
            "choices": [choice],
            "outrider": report("off"),
        }


def install(
    handler: Callable[[httpx.Request], httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client that is made from now on talks to this handler, in no particular colours."""
    http_client = httpx.Client(transport=httpx.MockTransport(handler))
    monkeypatch.setattr(client, "OpenAI", partial(OpenAI, http_client=http_client))
    for name in ("OUTRIDER_API_KEY", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def _event(choice: Body, **top: Any) -> bytes:
    frame = {"id": "cmpl-1", "created": 0, "model": "toy-target", "object": "chunk"}
    choice = {"index": 0, "finish_reason": None, "logprobs": None} | choice
    return f"data: {json.dumps(frame | {'choices': [choice]} | top)}\n\n".encode()


def stream_of(*choices: Body, outrider: Body | None = None) -> httpx.Response:
    """A chat stream of these choices and, if given, a last one with the report."""
    events = [_event(choice) for choice in choices]
    if outrider is not None:
        last = {"delta": {}, "finish_reason": "stop", "outrider": {"tokens": [], "prompt_ids": [1]}}
        events += [_event(last, outrider=outrider), b"data: [DONE]\n\n"]
    headers = {"content-type": "text/event-stream"}
    return httpx.Response(200, headers=headers, content=iter(events))


def error(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "x", "code": None}})
