"""Bodies that no well-meaning client sends: refused, never a 5xx, and nobody else notices.

After every one a canary request must be answered as ever.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import httpx
import pytest

from tests.serve_app.server import (
    CHAT,
    JSON,
    TEXT,
    assert_refused,
    assert_still_right,
    post_raw,
    serving,
)


@pytest.fixture
async def client() -> AsyncGenerator[httpx.AsyncClient, None]:
    async with serving(**{"http.max_body_bytes": 2**16}) as server:
        yield server.client


# ---- C43, C44: what is no JSON object, or one that means two things


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b"", None, "body"),
        (b"{", None, "JSON"),
        (b"null", None, "JSON object"),
        (b'"x"', None, "JSON object"),
        (b"[]", None, "JSON object"),
        (b'{"prompt":"a"} {}', None, "JSON"),
        (b'{"prompt":"a\nb"}', None, "JSON"),
        (b'{"prompt":"\xff"}', None, "JSON"),
        (b'{"prompt":"\xed\xa0\x80"}', None, "utf-8"),
        ('{"prompt":"a"}'.encode("utf-16"), None, "utf-8"),
        (b'{"prompt":"a","temperature":NaN}', None, "NaN"),
        (b'{"prompt":"a","temperature":Infinity}', None, "Infinity"),
        (b'{"prompt":"a","x":-Infinity}', None, "-Infinity"),
        (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", None, "digits"),
        (b'{"prompt":"a","prompt":"a"}', "prompt", "twice"),
        (b'{"prompt":"a","\\u0070rompt":"a"}', "prompt", "twice"),
        (b'{"prompt":"a","outrider":{"method":"off","method":"off"}}', "method", "twice"),
        (b'{"prompt":"a","logit_bias":{"97":1,"97":1}}', "97", "twice"),
        (b'{"prompt":"a","x":[{"y":1,"y":1}]}', "y", "twice"),
    ],
)
async def test_a_body_that_is_not_one_json_object_says_so(
    client: httpx.AsyncClient, body: bytes, param: str | None, said: str
) -> None:
    await assert_refused(client, TEXT, body, param, said)


@pytest.mark.parametrize("depth", [100, 1_000, 20_000])
@pytest.mark.parametrize(
    "field", ["x", "tools", "metadata", "prompt", "stop", "outrider", "messages"]
)
async def test_a_deep_body_is_refused(client: httpx.AsyncClient, field: str, depth: int) -> None:
    """C44."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        deep = opening * depth + "1" + closing * depth
        body = f'{{"{field}":{deep}}}'
        response = await post_raw(client, CHAT if field == "messages" else TEXT, body)
        assert response.status_code in (400, 413)
        assert len(response.content) < 1000
        if response.status_code == 400 and depth == 20_000:
            assert "nested too deeply" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "x",
        "\xff",
    ],
)
async def test_what_a_web_page_can_send_without_being_asked_is_refused(
    client: httpx.AsyncClient, content_type: str | None
) -> None:
    """C43: a wrong content type; all of these need no preflight."""
    headers = {} if content_type is None else {"content-type": content_type.encode("latin-1")}
    response = await client.post(TEXT, content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]
    await assert_still_right(client)


async def test_a_byte_order_mark_and_json_with_a_charset_are_taken(
    client: httpx.AsyncClient,
) -> None:
    """C44."""
    body = json.dumps({"prompt": "é", "temperature": 0}, ensure_ascii=False).encode()
    texts = set()
    for content in (body, b"\xef\xbb\xbf" + body):
        for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON"):
            answer = await client.post(TEXT, content=content, headers={"content-type": kind})
            texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1


# ---- C44: text


@pytest.mark.parametrize("bad", [r"\ud800", r"a\udfffb", r"\udc00\ud800", r"\ud83d"])
async def test_a_lone_surrogate_is_refused_wherever_it_is(
    client: httpx.AsyncClient, bad: str
) -> None:
    """C44: in values and in keys; a valid pair is text."""
    prompt = '"prompt":"x","max_tokens":1'
    for fault, param in [
        (f'"user":"{bad}"', "user"),
        (f'"model":"{bad}"', "model"),
        (f'"stop":["{bad}"]', "stop"),
        (f'"metadata":{{"k":"{bad}"}}', "metadata.k"),
    ]:
        await assert_refused(client, TEXT, f"{{{prompt},{fault}}}", param)
    for fault in (
        f'"{bad}":1',
        f'"metadata":{{"{bad}":"v"}}',
        f'"logit_bias":{{"{bad}":1}}',
        f'"outrider":{{"{bad}":1}}',
        f'"{bad}":1,"{bad}":1',
    ):
        response = await post_raw(client, TEXT, f"{{{prompt},{fault}}}")
        assert response.status_code == 400
        response.content.decode()
    for message, param in [
        (f'{{"role":"user","content":"{bad}"}}', "messages.1.content"),
        (f'{{"role":"user","content":[{{"type":"text","text":"{bad}"}}]}}', "messages.1.content"),
        (f'{{"role":"user","content":"x","name":"{bad}"}}', "messages.1.name"),
        (f'{{"role":"{bad}","content":"x"}}', "messages.1.role"),
        (f'{{"role":"user","content":"x","{bad}":1}}', "messages.1"),
    ]:
        body = f'{{"messages":[{{"role":"user","content":"x"}},{message}]}}'
        await assert_refused(client, CHAT, body, param)
    response = await post_raw(client, TEXT, r'{"prompt":"\ud83d\ude00","max_tokens":1}')
    assert response.json()["usage"]["prompt_tokens"] == 4


async def test_a_nul_neither_cuts_a_prompt_nor_a_message(client: httpx.AsyncClient) -> None:
    """C44."""
    text = "first half\0second half"
    answer = await post_raw(client, TEXT, {"prompt": text, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == len(text)
    lengths = []
    for content in (text, text.replace("\0", "x")):
        messages = [{"role": "user", "content": content}]
        answer = await post_raw(client, CHAT, {"messages": messages, "max_tokens": 1})
        lengths.append(answer.json()["usage"]["prompt_tokens"])
    assert lengths[0] == lengths[1]


async def test_a_large_body_is_refused(client: httpx.AsyncClient) -> None:
    """C44: also one that comes in pieces and never says how long it is."""
    for field in ("prompt", "stop", "user", "model", "x"):
        response = await post_raw(client, TEXT, {"prompt": "a", field: "y" * 2**17})
        assert response.status_code == 413

    async def endless() -> AsyncGenerator[bytes, None]:
        while True:
            yield b" " * 1000

    response = await client.post(TEXT, content=endless(), headers=JSON)
    assert response.status_code == 413
    await assert_still_right(client)
