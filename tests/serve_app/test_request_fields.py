"""What the fields of a request do, held against the toy target itself."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.engines.scripted import END_ID, VOCABULARY, ToyModel
from policies.types import SamplingParams
from tests.serve_app.conftest import TARGET
from tests.serve_app.server import CHAT, TEXT, serving, streamed, whole, writing
from tests.serve_app.test_api import CHAT as HELLO
from tests.serve_app.test_api import CHAT_PROMPT, events

SAMPLED = {"temperature": 1.0, "max_tokens": 25, "seed": 42}
ENDING = ToyModel(seed=3, end_every=12)


async def text_of(client: httpx.AsyncClient, **body: Any) -> str:
    [told], _ = await whole(client, TEXT, {"prompt": "once"} | body)
    return told.text


# ---- n, and batches of prompts


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63 - 1, -(2**63)])
async def test_n_choices_are_sessions_of_their_own_and_the_first_is_that_of_n_1(
    ready: httpx.AsyncClient, seed: int
) -> None:
    body = HELLO | SAMPLED | {"seed": seed}
    [alone], _ = await whole(ready, CHAT, body)
    four, usage = await whole(ready, CHAT, body | {"n": 4})
    assert four[0] == alone
    assert len({told.text for told in four}) == 4
    assert await whole(ready, CHAT, body | {"n": 4}) == (four, usage)
    two, _ = await whole(ready, CHAT, body | {"n": 2})
    assert two == four[:2]
    assert usage["prompt_tokens"] == len(CHAT_PROMPT)
    assert usage["completion_tokens"] == 4 * 25


async def test_greedy_choices_of_one_prompt_are_all_alike(ready: httpx.AsyncClient) -> None:
    told, _ = await whole(ready, CHAT, HELLO | {"n": 3, "max_tokens": 10})
    assert told == [told[0]] * 3


@pytest.mark.parametrize("fetch", [whole, streamed])
async def test_a_batch_of_prompts_equals_the_single_requests(
    ready: httpx.AsyncClient, fetch: Any
) -> None:
    prompts = ["once", " ", "twice upon", "once"]
    body = SAMPLED | {"n": 2, "logprobs": 1, "stop": ["ee", "x"]}
    singles = [await fetch(ready, TEXT, body | {"prompt": prompt}) for prompt in prompts]
    told, usage = await fetch(ready, TEXT, body | {"prompt": prompts})
    assert told == [choice for choices, _ in singles for choice in choices]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == sum(single[name] for _, single in singles)


async def test_token_ids_are_a_prompt_like_their_text(ready: httpx.AsyncClient) -> None:
    texts = ["once", "twice"]
    ids = [list(text.encode()) for text in texts]
    by_text = await whole(ready, TEXT, SAMPLED | {"prompt": texts})
    assert await whole(ready, TEXT, SAMPLED | {"prompt": ids}) == by_text
    one = await whole(ready, TEXT, SAMPLED | {"prompt": ids[0]})
    assert one == await whole(ready, TEXT, SAMPLED | {"prompt": "once"})


# ---- log-probabilities


def log_softmax(model: ToyModel, before: bytes) -> np.ndarray:
    row = model.logits(list(before)).astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize("fetch", [whole, streamed])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.7, "top_k": 1}, SAMPLED]
)
@pytest.mark.parametrize("method", ["speculative", "off"])
async def test_chat_logprobs_are_the_targets_log_softmax(
    ready: httpx.AsyncClient, fetch: Any, sampling: dict[str, Any], method: str
) -> None:
    """C26: one entry per token, accepted, recovered or bonus, whatever drafted it."""
    asked = {"max_tokens": 25, "logprobs": True, "top_logprobs": 5}
    options = {"method": method, "tokens": True}
    [told], _ = await fetch(ready, CHAT, HELLO | sampling | asked | {"outrider": options})
    assert len(told.logprobs) == len(told.ids) == 25
    before = CHAT_PROMPT
    for token_id, entry in zip(told.ids, told.logprobs, strict=True):
        expected = log_softmax(TARGET, before)
        best = sorted(range(len(expected)), key=lambda i: (-expected[i], i))[:5]
        assert entry["bytes"] == list(entry["token"].encode()) == [token_id]
        assert entry["logprob"] == pytest.approx(expected[token_id], abs=1e-5)
        assert [top["bytes"] for top in entry["top_logprobs"]] == [[i] for i in best]
        figures = [top["logprob"] for top in entry["top_logprobs"]]
        assert figures == pytest.approx([expected[i] for i in best], abs=1e-5)
        before += bytes([token_id])


async def test_completion_logprobs_say_where_each_token_begins_in_the_text() -> None:
    """C26: also where a character is split over tokens, and at an end id, which adds no text."""
    async with writing("aé😀b".encode()) as client:
        [told], _ = await whole(client, TEXT, {"prompt": "x", "max_tokens": 99, "logprobs": 1})
    tokens, figures, tops, offsets = zip(*told.logprobs, strict=True)
    assert tokens == ("a", *["\ufffd"] * 6, "b", "<end>")
    # the byte that completes a character begins where the character does
    assert offsets == (0, 1, 1, 2, 2, 2, 2, 3, 4)
    assert all(figure == pytest.approx(0.0, abs=1e-6) for figure in figures)
    assert all(list(top) == [token] for token, top in zip(tokens, tops, strict=True))


async def test_what_is_never_written_has_a_finite_logprob(ready: httpx.AsyncClient) -> None:
    """C26: JSON has no -inf."""
    few = {str(i): -100 for i in b"abcdefghijklmnopqrstuvwxyz"}
    asked = HELLO | {"max_tokens": 3, "logprobs": True, "top_logprobs": 20, "logit_bias": few}
    response = await ready.post(CHAT, json=asked)
    answer = json.loads(response.text, parse_constant=pytest.fail)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["token"] == " "
        assert len(entry["top_logprobs"]) == 20
        assert all(math.isfinite(top["logprob"]) for top in entry["top_logprobs"])
    async with writing(b"ab") as client:
        [told], _ = await whole(client, TEXT, {"prompt": "x", "logprobs": 5})
        assert all(math.isfinite(figure) for entry in told.logprobs for figure in entry[2].values())


async def test_without_alternatives_the_tokens_own_logprobs_come(ready: httpx.AsyncClient) -> None:
    [told], _ = await whole(ready, CHAT, HELLO | {"max_tokens": 4, "logprobs": True})
    assert [entry["top_logprobs"] for entry in told.logprobs] == [[]] * 4
    [told], _ = await whole(ready, TEXT, {"prompt": "x", "max_tokens": 4, "logprobs": 0})
    assert [top for _, _, top, _ in told.logprobs] == [{t: p} for t, p, _, _ in told.logprobs]
    [told], _ = await whole(ready, CHAT, HELLO | {"max_tokens": 4})
    assert told.logprobs == ()


# ---- ends


def ends(prompt: bytes, count: int, **sampling: Any) -> bytes:
    ids = ENDING.write(prompt, count, SamplingParams(stop_ids=frozenset({END_ID}), **sampling))
    return bytes(i for i in ids if i != END_ID)


async def test_an_end_id_stops_and_ignore_eos_and_min_tokens_put_it_off() -> None:
    async with serving(ENDING, ENDING) as server:
        client = server.client
        greedy = {"prompt": "once", "temperature": 0, "max_tokens": 60}
        [told], usage = await whole(client, TEXT, greedy)
        natural = len(told.text)
        assert (told.text, told.reason) == (ends(b"once", 60).decode(), "stop")
        assert usage["completion_tokens"] == natural + 1 < 50  # the end id is a token
        [told], usage = await whole(client, TEXT, greedy | {"ignore_eos": True})
        assert (told.reason, usage["completion_tokens"]) == ("length", 60)
        for minimum in (0, 1, natural, natural + 1, natural + 9, 60):
            [told], usage = await whole(client, TEXT, greedy | {"min_tokens": minimum})
            assert told.text == ends(b"once", 60, min_tokens=minimum).decode()
            assert usage["completion_tokens"] >= minimum
            assert len(told.text) >= min(minimum, 60)


@pytest.mark.parametrize("fetch", [whole, streamed])
async def test_a_stop_string_before_min_tokens_is_text(fetch: Any) -> None:
    async with writing(b"ab ab ab ab") as client:
        for minimum, text, count in [(0, "", 2), (3, "ab ", 5), (6, "ab ab ", 8)]:
            body = {"prompt": "x", "stop": "ab", "min_tokens": minimum}
            [told], usage = await fetch(client, TEXT, body)
            assert (told.text, told.reason) == (text, "stop"), minimum
            assert usage["completion_tokens"] == count


# ---- penalties and bias


@pytest.mark.parametrize("method", ["speculative", "off"])
@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0, "frequency_penalty": -1.0},
        {"frequency_penalty": 1.1, "top_p": 0.9},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5, "top_k": 5},
        {"logit_bias": {"101": 3.5, "32": -100}, "presence_penalty": 0.5},
    ],
)
async def test_penalties_and_bias_are_the_targets_own(
    ready: httpx.AsyncClient, fields: dict[str, Any], method: str
) -> None:
    bias = tuple((int(key), value) for key, value in fields.get("logit_bias", {}).items())
    params = SamplingParams(1.0, seed=42, **(fields | {"logit_bias": bias}))
    text = await text_of(ready, **SAMPLED, **fields, outrider={"method": method})
    assert text == bytes(TARGET.write(b"once", 25, params)).decode()
    assert text != await text_of(ready, **SAMPLED)


@pytest.mark.parametrize("method", ["speculative", "off"])
async def test_a_bias_holds_at_every_position(ready: httpx.AsyncClient, method: str) -> None:
    """C25: a banned token nowhere, a forced one everywhere, in any verdict's place."""
    greedy = {"temperature": 0, "max_tokens": 60, "outrider": {"method": method}}
    banned = max(await text_of(ready, **greedy))
    assert banned not in await text_of(ready, **greedy, logit_bias={str(ord(banned)): -100})
    forced = await text_of(ready, **greedy, logit_bias={str(ord("q")): 100})
    assert forced == "q" * 60


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_only_labels_a_request_changes_nothing(
    ready: httpx.AsyncClient, path: str
) -> None:
    body = SAMPLED | ({"prompt": "once"} if path == TEXT else HELLO)
    labels = {"user": "é", "metadata": {"k" * 64: "v" * 512}, "store": True, "model": "toy-target"}
    assert await whole(ready, path, body | labels) == await whole(ready, path, body)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_model_that_is_not_served_is_not_found(ready: httpx.AsyncClient, path: str) -> None:
    body = {"prompt": "once"} if path == TEXT else HELLO
    for name in ("gpt-4o", "toy-target ", "TOY-TARGET", "../x", "\0"):
        response = await ready.post(path, json=body | {"model": name})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert error["param"] == "model"
    assert (await ready.get("/v1/models/gpt-4o")).status_code == 404
    assert (await ready.get("/v1/models/toy-target")).json()["id"] == "toy-target"


async def test_token_details_account_for_the_whole_answer(ready: httpx.AsyncClient) -> None:
    body = HELLO | {"max_tokens": 25, "stop": "zz", "outrider": {"tokens": True}}
    answer = (await ready.post(CHAT, json=body)).json()
    [choice] = answer["choices"]
    tokens = choice["outrider"]["tokens"]
    assert "".join(token["text"] for token in tokens) == choice["message"]["content"]
    assert choice["outrider"]["prompt_ids"] == list(CHAT_PROMPT)
    origins = [token["origin"] for token in tokens]
    for origin in ("accepted", "recovered", "bonus"):
        assert origins.count(origin) == answer["outrider"][origin]
    assert all(VOCABULARY[token["id"]] == token["text"].encode() for token in tokens)
    chunks = [json.loads(chunk) for chunk in (await events(ready, CHAT, body))[:-1]]
    told = ["prompt_ids" in chunk["choices"][0]["outrider"] for chunk in chunks]
    assert told == [False] * (len(told) - 1) + [True]
