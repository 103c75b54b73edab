"""Streams: what they are made of, and that they tell what the whole answer tells."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from deployments.engines.scripted import ToyModel
from tests.serve_app.server import CHAT, TEXT, Told, ids_of, serving, streamed, whole, writing
from tests.serve_app.test_api import events


def random_body(rng: random.Random, path: str) -> dict[str, Any]:
    words = ["once", "a", "the quick brown fox", "é😀", "\n\t "]
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "seed": rng.randrange(2**40)}
    body |= {"temperature": rng.choice([0, 0.7, 1.3]), "n": rng.choice([1, 1, 2, 4])}
    body |= {"outrider": {"tokens": True, "method": rng.choice(["speculative", "off"])}}
    if rng.random() < 0.5:
        body["stop"] = rng.sample(["e", " ", "th", "qu", "zz", "aa"], rng.randint(1, 4))
    if rng.random() < 0.3:
        body |= {"presence_penalty": 1.5, "repetition_penalty": 1.2}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": rng.choice(words)}]
        return body | ({"logprobs": True, "top_logprobs": 2} if rng.random() < 0.5 else {})
    body["prompt"] = rng.choice([rng.choice(words), rng.sample(words, 3), [97, 98], [[97], [98]]])
    return body | ({"logprobs": 3} if rng.random() < 0.5 else {})


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_tells_what_the_whole_answer_tells(
    ready: httpx.AsyncClient, path: str
) -> None:
    """Text, ids, logprobs, finish reasons and usage; for 40 requests of all kinds."""
    rng = random.Random(path)
    for _ in range(40):
        body = random_body(rng, path)
        once, usage = await whole(ready, path, body)
        again, usage_streamed = await streamed(ready, path, body)
        assert again == once, body
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage_streamed[name] == usage[name], body
        assert usage["completion_tokens"] == sum(len(one.ids) for one in once)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_a_stream_has_no_usage_unless_asked(
    ready: httpx.AsyncClient, options: dict[str, Any]
) -> None:
    body = {"prompt": "once", "max_tokens": 5} | options
    *chunks, done = await events(ready, TEXT, body)
    assert done == "[DONE]"
    assert all("usage" not in json.loads(chunk) for chunk in chunks)
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"


DIFFICULT = "👩🏽‍🔬👨‍👩‍👧‍👦 🇩🇪🇯🇵 한국어 مرحبا e\u0301\u0323 a\r\nb\u2028\u0085\u0000\ufffd ﷽ 𝕏"


@pytest.mark.parametrize("draft_len", [1, 3, 16])
@pytest.mark.parametrize("wrong_every", [0, 3])
async def test_no_character_is_split_lost_or_repeated(draft_len: int, wrong_every: int) -> None:
    """C14."""
    async with writing(DIFFICULT.encode(), draft_len, wrong_every) as client:
        for fetch in (whole, streamed):
            [one], usage = await fetch(client, TEXT, {"prompt": "x", "max_tokens": 999})
            assert one.text == DIFFICULT
            assert one.reason == "stop"
            assert usage["completion_tokens"] == len(DIFFICULT.encode()) + 1  # the end id too


async def test_an_event_is_one_line_for_clients_that_know_more_line_breaks_than_sse() -> None:
    """C14: httpx's `iter_lines`, and whatever else uses `str.splitlines`."""
    async with writing("a\u2028b\u2029c\u0085d\u000be\u001cf\r\n".encode(), 16) as client:
        body = {"prompt": "x", "max_tokens": 99, "stream": True}
        async with client.stream("POST", TEXT, json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)


async def test_a_cut_character_is_one_replacement_character_in_both_modes() -> None:
    """C14: max_tokens at every byte of an emoji, of CJK and of what follows."""
    data = "a😀漢b".encode()
    async with writing(data) as client:
        for count in range(1, len(data) + 1):
            body = {"prompt": "x", "max_tokens": count}
            [one], usage = await whole(client, TEXT, body)
            assert await streamed(client, TEXT, body) == ([one], usage)
            assert one == Told(data[:count].decode(errors="replace"), "length")
            assert usage["completion_tokens"] == count


@pytest.mark.parametrize("data", [b"\x80" * 50, b"\xf0\x9f" * 25, b"\xc3\x28" * 25, b"\xff" * 50])
async def test_bytes_that_are_no_text_neither_stall_a_stream_nor_add_up(data: bytes) -> None:
    """C14: one U+FFFD per bad sequence, each by the next verdict at the latest."""
    async with writing(data) as client:
        body = {"prompt": "x", "max_tokens": 50, "outrider": {"tokens": True}}
        [one], usage = await whole(client, TEXT, body)
        assert (one.text, usage["completion_tokens"]) == (data.decode(errors="replace"), 50)
        chunks = [json.loads(c) for c in (await events(client, TEXT, body))[:-1]]
        sent, text = b"", ""
        for chunk in chunks:
            sent += bytes(ids_of(chunk["choices"][0]))
            text += chunk["choices"][0]["text"]
            assert text.startswith(sent[:-3].decode(errors="replace")[:-1])  # 3 may be a character
        assert text == one.text


def cut(tokens: Sequence[bytes], stop: Sequence[str], limit: int) -> tuple[str, str, int]:
    """Oracle: text, finish reason and number of tokens, token by token."""
    data = b""
    for count, token in enumerate(tokens[:limit], 1):
        data += token
        found = [at for text in stop if (at := data.find(text.encode())) >= 0]
        if found:
            return data[: min(found)].decode(), "stop", count
    return data.decode(), "length", limit


COUNT = "one two three four five six seven"
WORDS = [b"one", b" two", b" thr", b"ee four", b" five", b" six seven"]
STOPS = [
    [" three"],
    ["ab", "abc", "bc", "c"],
    ["e"],
    ["o t", "two", " "],
    ["seven", "x"],
    ["four fi", "ee four", "r f"],
    [COUNT],
    [COUNT + "!"],
]


@pytest.mark.parametrize(("draft_len", "wrong_every"), [(1, 0), (4, 0), (4, 3), (16, 0), (64, 9)])
async def test_text_ends_before_the_first_stop_string_for_every_draft_length(
    draft_len: int, wrong_every: int
) -> None:
    """C11: in long accepted blocks, of bytes and of words; the same with the target alone."""
    for written in (COUNT.encode(), b"xaababcabc" * 3, WORDS):
        tokens = [bytes([w]) if isinstance(w, int) else w for w in written]
        async with writing(written, draft_len, wrong_every) as client:
            for stop in STOPS:
                body = {"prompt": "x", "max_tokens": len(tokens), "stop": stop}
                expected = cut(tokens, stop, len(tokens))
                for fetch, method in ((whole, "off"), (streamed, "speculative")):
                    asked = body | {"outrider": {"method": method, "tokens": True}}
                    [one], usage = await fetch(client, TEXT, asked)
                    assert (one.text, one.reason, len(one.ids)) == expected, (stop, method)
                    assert usage["completion_tokens"] == len(one.ids)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stop_token", [1, 2, 3, 5])
async def test_stop_or_length_is_whatever_comes_first_and_cuts_everything_there(
    path: str, limit: int, stop_token: int
) -> None:
    """C12: one block of accepted tokens holds the stop string and crosses max_tokens."""
    prompt: dict[str, Any] = {"prompt": "canary", "logprobs": 1}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    async with serving(draft=ToyModel(0, 1.0), **{"policy.draft_len": 16}) as server:
        client = server.client
        body = prompt | {"temperature": 0, "outrider": {"tokens": True}}
        [free], _ = await whole(client, path, body | {"max_tokens": 8})
        assert len(set(free.text)) > 5
        stop = free.text[:stop_token][-2:]
        expected = cut([bytes([i]) for i in free.ids], [stop], limit)
        for fetch in (whole, streamed):
            [one], usage = await fetch(client, path, body | {"max_tokens": limit, "stop": stop})
            assert (one.text, one.reason, len(one.ids)) == expected
            assert one.ids == free.ids[: len(one.ids)]
            assert one.logprobs == free.logprobs[: len(one.ids)]
            assert usage["completion_tokens"] == len(one.ids)
            details = usage["completion_tokens_details"]
            assert sum(details.values()) <= usage["completion_tokens"]
