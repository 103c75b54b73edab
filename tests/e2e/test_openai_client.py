"""The official OpenAI client against the deployed graph: what its users rely on."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from policies.types import SamplingParams
from tests.e2e.conftest import Deploy
from tests.e2e.scripted import SCRIPTED, alone

PROMPT = "once upon a time"
MESSAGES = [{"role": "user", "content": "tell me"}]
CHAT_PROMPT = "user: tell me\nassistant: "


@pytest.fixture(scope="module")
def client(module_deploy: Deploy) -> Iterator[openai.OpenAI]:
    http = module_deploy(**SCRIPTED)
    base_url = str(http.base_url).rstrip("/") + "/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=MESSAGES, max_completion_tokens=30, temperature=0
    )
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == alone(CHAT_PROMPT, 30)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0
    assert (details.rejected_prediction_tokens or 0) > 0


def test_completion_with_seed_and_stop(client: openai.OpenAI) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.8, seed=7)
    text = alone(PROMPT, 40, sampling)
    stop = text[20:23]
    answer = client.completions.create(
        model="scripted",
        prompt=PROMPT,
        max_tokens=40,
        temperature=0.9,
        top_p=0.8,
        seed=7,
        stop=stop,
    )
    assert answer.choices[0].text == text[: text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == alone(CHAT_PROMPT, 30)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 30
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


def test_the_clients_own_stream_helper_gathers_the_answer(client: openai.OpenAI) -> None:
    """It takes an answer that ends by its length for an error, so this one stops."""
    text = alone(CHAT_PROMPT, 40)
    with client.chat.completions.stream(
        model="scripted", messages=MESSAGES, max_tokens=40, temperature=0, stop=text[15:18]
    ) as stream:
        stream.until_done()
        gathered = stream.get_final_completion()
    assert gathered.choices[0].message.content == text[: text.find(text[15:18])]


def test_choices_logprobs_and_batches(client: openai.OpenAI) -> None:
    """Several sessions of one HTTP request at once; none waits for the resend after 5 s."""
    chat = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,
        max_tokens=12,
        n=4,
        seed=1,
        logprobs=True,
        top_logprobs=3,
        timeout=4.0,
    )
    assert [choice.index for choice in chat.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in chat.choices}) == 4
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 12
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    prompts = ["one", "two", "three"]
    batch = client.completions.create(
        model="scripted", prompt=prompts, max_tokens=10, temperature=0, timeout=4.0
    )
    assert [choice.text for choice in batch.choices] == [alone(prompt, 10) for prompt in prompts]
    ids = client.completions.create(
        model="scripted", prompt=list(b"one"), max_tokens=10, temperature=0
    )
    assert ids.choices[0].text == alone("one", 10)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="scripted", messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert refused.value.param == "response_format"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.request_id


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
