"""The HTTP endpoint, over the scripted pair: what it answers, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deployments.driver import Driver
from deployments.engines.protocol import EngineError
from policies.types import SamplingParams
from serve_app.api import Api
from tests.serve_app.conftest import TARGET

CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
CHAT_PROMPT = b"user: hello\nassistant: "


def written(prompt: bytes, count: int, sampling: SamplingParams | None = None) -> str:
    ids = TARGET.write(prompt, count, sampling or SamplingParams())
    return bytes(ids).decode()


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def test_chat_answers_what_the_target_writes(ready: httpx.AsyncClient) -> None:
    response = await ready.post("/v1/chat/completions", json=CHAT | {"max_tokens": 30})
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "toy-target"
    [choice] = body["choices"]
    text = written(CHAT_PROMPT, 30)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "length"
    details = body["usage"].pop("completion_tokens_details")
    assert body["usage"] == {
        "prompt_tokens": len(CHAT_PROMPT),
        "completion_tokens": 30,
        "total_tokens": len(CHAT_PROMPT) + 30,
    }
    report = body["outrider"]
    assert details["accepted_prediction_tokens"] == report["accepted"] > 0
    replaced = sum(report["judged_at"]) - sum(report["accepted_at"])
    assert details["rejected_prediction_tokens"] == replaced > 0


async def test_the_response_reports_how_it_was_drafted(ready: httpx.AsyncClient) -> None:
    response = await ready.post("/v1/chat/completions", json=CHAT | {"max_tokens": 30})
    report = response.json()["outrider"]
    assert set(report) == {
        "mode",
        "rounds",
        "navs",
        "batches",
        "drafted",
        "accepted",
        "recovered",
        "bonus",
        "resends",
        "reopens",
        "rollbacks",
        "acceptance_rate",
        "acceptance_len",
        "accepted_at",
        "judged_at",
        "uplink_bytes",
        "downlink_bytes",
        "verify_ms",
        "tpt_ms",
        "ttft_ms",
    }
    assert report["mode"] == "speculative"
    assert 0 < report["accepted"] <= report["drafted"]
    assert report["acceptance_rate"] == report["accepted"] / report["drafted"]
    assert report["ttft_ms"] > 0


async def test_method_off_gives_the_same_text_without_drafts(ready: httpx.AsyncClient) -> None:
    body = CHAT | {"max_tokens": 30, "outrider": {"method": "off"}}
    answer = (await ready.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == written(CHAT_PROMPT, 30)
    assert answer["outrider"]["mode"] == "off"
    assert answer["outrider"]["drafted"] == 0
    assert answer["outrider"]["acceptance_rate"] is None


async def test_a_stream_has_the_role_first_one_finish_reason_and_done(
    ready: httpx.AsyncClient,
) -> None:
    *chunks, done = await events(ready, "/v1/chat/completions", CHAT | {"max_tokens": 30})
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    deltas = [chunk["choices"][0]["delta"] for chunk in parsed]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == written(CHAT_PROMPT, 30)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in parsed]
    assert reasons == [None] * (len(parsed) - 1) + ["length"]
    assert len({chunk["id"] for chunk in parsed}) == 1
    assert parsed[-1]["outrider"]["mode"] == "speculative"


async def test_completions_stream_the_text_of_the_whole_answer(ready: httpx.AsyncClient) -> None:
    body = {"prompt": "once", "max_tokens": 25, "temperature": 0.8, "seed": 5}
    whole = (await ready.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    chunks = await events(ready, "/v1/completions", body)
    streamed = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])
    assert whole == streamed == written(b"once", 25, SamplingParams(0.8, seed=5))


async def test_sampling_parameters_reach_the_target(ready: httpx.AsyncClient) -> None:
    body = {"prompt": "once", "max_tokens": 25, "temperature": 1.5, "top_p": 0.7, "top_k": 4}
    answer = (await ready.post("/v1/completions", json=body | {"seed": 9})).json()
    expected = written(b"once", 25, SamplingParams(1.5, 4, 0.7, 9))
    assert answer["choices"][0]["text"] == expected


async def test_an_unseeded_request_draws_its_own_seed(ready: httpx.AsyncClient) -> None:
    body = {"prompt": "once", "max_tokens": 40}
    texts = {
        (await ready.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        for _ in range(3)
    }
    assert len(texts) == 3  # two of 27^40 texts agreeing by chance: below 1e-20


@pytest.mark.parametrize("stream", [False, True])
async def test_text_ends_before_the_first_stop_string(
    ready: httpx.AsyncClient, stream: bool
) -> None:
    whole = written(CHAT_PROMPT, 60)
    stop = [whole[30:33], whole[20:22]]
    cut = min(whole.find(text) for text in stop)
    body = CHAT | {"max_tokens": 60, "stop": stop}
    if stream:
        *chunks, done = await events(ready, "/v1/chat/completions", body)
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        reason = choices[-1]["finish_reason"]
        assert done == "[DONE]"
    else:
        answer = (await ready.post("/v1/chat/completions", json=body)).json()
        text = answer["choices"][0]["message"]["content"]
        reason = answer["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] < 60
    assert text == whole[:cut]
    assert reason == "stop"


async def test_without_max_tokens_a_chat_goes_on_to_the_end_of_the_context(
    ready: httpx.AsyncClient,
) -> None:
    answer = (await ready.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_without_max_tokens_a_completion_has_sixteen(ready: httpx.AsyncClient) -> None:
    answer = (await ready.post("/v1/completions", json={"prompt": "once"})).json()
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 7, 11])
async def test_usage_counts_exactly_the_delivered_tokens(
    ready: httpx.AsyncClient, max_tokens: int
) -> None:
    """C08, at the endpoint; C40: usage is what was delivered."""
    body = {"prompt": "once", "max_tokens": max_tokens, "temperature": 0}
    answer = (await ready.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["text"] == written(b"once", max_tokens)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"stream_options": {"include_usage": False}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "12"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": "a"}, "seed"),
        ({"seed": 10**20}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 300}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"outrider": {"method": "fast"}}, "outrider.method"),
        ({"outrider": {"k": 1}}, "outrider.k"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages"),
    ],
)
async def test_what_is_wrong_or_unsupported_is_refused_naming_the_field(
    ready: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    response = await ready.post("/v1/chat/completions", json=CHAT | change)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_null_means_default(ready: httpx.AsyncClient) -> None:
    body = CHAT | {"top_p": None, "top_k": None, "stop": None, "seed": None, "stream": None}
    response = await ready.post("/v1/chat/completions", json=body | {"max_tokens": 3})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "idle"),
    [
        ("/v1/chat/completions", {"tools": [], "tool_choice": "none"}),
        ("/v1/chat/completions", {"response_format": {"type": "text"}, "modalities": ["text"]}),
        (
            "/v1/chat/completions",
            {"stream_options": {"include_obfuscation": False}, "stream": True},
        ),
        ("/v1/completions", {"echo": False, "best_of": 1, "suffix": ""}),
    ],
)
async def test_a_field_that_asks_for_nothing_is_taken(
    ready: httpx.AsyncClient, path: str, idle: dict[str, Any]
) -> None:
    body = CHAT if "chat" in path else {"prompt": "x"}
    assert (await ready.post(path, json=body | {"max_tokens": 2} | idle)).status_code == 200


@pytest.mark.parametrize("other", [{"echo": 0}, {"echo": True}, {"best_of": True}, {"best_of": 2}])
async def test_only_the_value_that_asks_for_nothing_is_taken(
    ready: httpx.AsyncClient, other: dict[str, Any]
) -> None:
    response = await ready.post("/v1/completions", json={"prompt": "x"} | other)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(other))


async def test_an_unseeded_batch_of_equal_prompts_has_a_text_for_each(
    ready: httpx.AsyncClient,
) -> None:
    """False alarm: 20 tokens at temperature 2 alike, under 10⁻⁶. With a seed they are alike."""
    body = {"prompt": ["hello"] * 4, "max_tokens": 20, "temperature": 2.0}
    for seed, texts in ((None, 4), (7, 1)):
        answer = (await ready.post("/v1/completions", json=body | {"seed": seed})).json()
        assert len({choice["text"] for choice in answer["choices"]}) == texts


async def test_the_path_without_a_name_is_no_model(ready: httpx.AsyncClient) -> None:
    assert (await ready.get("/v1/models/")).status_code == 404


async def test_an_unknown_model_is_not_found(ready: httpx.AsyncClient) -> None:
    response = await ready.post("/v1/chat/completions", json=CHAT | {"model": "other"})
    assert response.status_code == 404
    assert "toy-target" in response.json()["error"]["message"]


@pytest.mark.parametrize("field", ["prompt", "model", "stop"])
async def test_a_lone_surrogate_is_refused_naming_the_field(
    ready: httpx.AsyncClient, field: str
) -> None:
    body = '{"prompt": "x", "FIELD": "a\\ud800b"}'.replace("FIELD", field)
    headers = {"content-type": "application/json"}
    response = await ready.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_a_wrong_method_says_which_is_allowed(ready: httpx.AsyncClient) -> None:
    response = await ready.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'{"messages": NaN}'])
async def test_a_body_that_is_no_request_is_refused(ready: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await ready.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_empty_prompt_is_refused(ready: httpx.AsyncClient) -> None:
    response = await ready.post("/v1/completions", json={"prompt": ""})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


async def test_a_body_over_the_limit_is_413(ready: httpx.AsyncClient) -> None:
    response = await ready.post("/v1/completions", json={"prompt": "x" * 5000})
    assert response.status_code == 413


async def test_an_unknown_path_is_an_error_object(ready: httpx.AsyncClient) -> None:
    response = await ready.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


async def test_until_the_models_are_loaded_ready_says_what_is_missing(
    client: httpx.AsyncClient, driver: Driver
) -> None:
    response = await client.get("/ready")
    assert response.status_code == 503
    assert response.json()["missing"] == ["draft", "target"]
    assert (await client.get("/health")).status_code == 200
    refused = await client.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503
    assert "Retry-After" in refused.headers
    await driver.start()
    response = await client.get("/ready")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "draft": "scripted", "target": "toy-target"}


async def test_a_pair_that_cannot_serve_says_why(client: httpx.AsyncClient, api: Api) -> None:
    api.defect = "id 7 is 'a' for the draft and 'b' for the target"
    response = await client.get("/ready")
    assert (response.status_code, response.json()["status"]) == (503, "failed")
    refused = await client.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 503
    assert "id 7" in refused.json()["error"]["message"]


async def test_models_lists_the_target(ready: httpx.AsyncClient) -> None:
    listed = (await ready.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["toy-target"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_generation_is_an_error_and_never_done(
    ready: httpx.AsyncClient, driver: Driver, stream: bool
) -> None:
    """C36: as an HTTP status, or as an error event that no [DONE] follows."""

    async def failing(*_: object) -> list:
        raise EngineError("logits are not finite")

    driver._verifier._engine.feed = failing  # type: ignore[attr-defined]
    body = CHAT | {"max_tokens": 5}
    if stream:
        sent = await events(ready, "/v1/chat/completions", body)
        assert "[DONE]" not in sent
        assert "not finite" in json.loads(sent[-1])["error"]["message"]
    else:
        response = await ready.post("/v1/chat/completions", json=body)
        assert response.status_code == 500
        assert "not finite" in response.json()["error"]["message"]
