"""Chats of unusual shape, over a real Jinja template: served, or refused naming the message."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from deployments.engines.chat_template import ChatTemplate
from deployments.engines.protocol import ChatTemplateError
from deployments.engines.scripted import ByteTokenizer
from tests.serve_app.server import CHAT, assert_refused, post_raw, serving

# refuses what Gemma's, Mistral's and Llama 2's refuse
STRICT = """{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('system is not first') }}{% endif %}
{%- if m.role == 'assistant' and loop.first %}
{{- raise_exception('assistant begins') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}{% endfor %}"""
CHARACTERS = "{% for m in messages %}{{ m.content[0].lower() }}{% endfor %}"  # none in an empty one


class TemplateTokenizer(ByteTokenizer):
    """Bytes of what a Jinja template makes of a chat."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, re.compile("(?!)"), "", "")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(span.text for span in self._template.spans(messages)))


class NoTemplate(ByteTokenizer):
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ChatTemplateError("the model's file has no chat template")


@pytest.fixture
async def client() -> AsyncGenerator[httpx.AsyncClient, None]:
    async with serving(tokenizer=partial(TemplateTokenizer, STRICT)) as server:
        yield server.client


def says(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def part(text: Any, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | more


U, A, S = says("user"), says("assistant"), says("system")


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ([], "messages", ""),
        (None, "messages", ""),
        ({}, "messages", ""),
        ("x", "messages", ""),
        ([3], "messages.0", ""),
        ([U, "x"], "messages.1", ""),
        ([U, []], "messages.1", ""),
        ([U, None], "messages.1", ""),
        ([U, {}], "messages.1.role", ""),
        ([U, {"role": "user"}], "messages.1.content", ""),
        ([U, says("user", None)], "messages.1.content", ""),
        ([U, says("user", 3)], "messages.1.content", ""),
        ([U, says("user", {})], "messages.1.content", ""),
        ([U, says("user", [part(None)])], "messages.1.content", ""),
        ([U, says("user", ["x"])], "messages.1.content", ""),
        ([U, says("user", [{"type": "image_url", "image_url": {}}])], "messages.1.content", ""),
        ([U, says("user", [part("x", cache_control={})])], "messages.1.content", ""),
        ([U, says("tool")], "messages.1.role", ""),
        ([U, says("function")], "messages.1.role", ""),
        ([U, says("User")], "messages.1.role", ""),
        ([U, says("")], "messages.1.role", ""),
        ([U, says(["user"])], "messages.1.role", ""),
        ([U, says("user", name=3)], "messages.1.name", ""),
        ([U, says("assistant", tool_calls=[])], "messages.1.tool_calls", ""),
        ([U, S], "messages.1", "system is not first"),
        ([S, U, A, S, U], "messages.3", "system is not first"),
        ([S, says("developer")], "messages.1", "system is not first"),
        ([A, U], "messages.0", "assistant begins"),
        ([U] * 400 + [S] + [U] * 99, "messages.400", "system is not first"),
    ],
)
async def test_a_message_that_cannot_be_served_is_refused_by_its_index(
    client: httpx.AsyncClient, messages: Any, param: str, said: str
) -> None:
    """C42."""
    await assert_refused(client, CHAT, {"messages": messages}, param, said)


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([U], "<user>x"),
        ([S], "<system>x"),
        ([says("developer"), U], "<system>x<user>x"),
        ([U, A], "<user>x<assistant>x"),
        ([U, U, A, A], "<user>x<user>x<assistant>x<assistant>x"),
        ([says("user", "")], "<user>"),
        ([says("user", " \n\t")], "<user> \n\t"),
        ([says("user", [])], "<user>"),
        ([says("user", [part("a"), part(""), part(" b")])], "<user>a b"),
        ([says("user", "{{ 7 * 7 }}{% for %}")], "<user>{{ 7 * 7 }}{% for %}"),
        ([says("user", "a\r\nb\0c", name="é")], "<user>a\r\nb\0c"),
        ([U] * 30, "<user>x" * 30),
    ],
)
async def test_a_chat_of_unusual_shape_is_rendered_as_it_is(
    client: httpx.AsyncClient, messages: Any, rendered: str
) -> None:
    """C42, C15: white space is kept, and Jinja in a content is text."""
    body = {"messages": messages, "max_tokens": 1, "outrider": {"tokens": True}}
    response = await post_raw(client, CHAT, body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert bytes(choice["outrider"]["prompt_ids"]).decode() == rendered


async def test_a_model_without_a_template_serves_completions_but_no_chats() -> None:
    """C42."""
    async with serving(tokenizer=NoTemplate) as server:
        await assert_refused(server.client, CHAT, {"messages": [U]}, "messages", "no chat template")


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ messages[9].content }}", "{{ x() }}", "{{ 1/0 }}"]
)
async def test_a_broken_template_is_a_refusal_and_no_server_error(source: str) -> None:
    """C42: whatever a model's file makes of the messages."""
    async with serving(tokenizer=partial(TemplateTokenizer, source)) as server:
        response = await post_raw(server.client, CHAT, {"messages": [U]})
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]


async def test_a_template_that_fails_on_a_content_names_its_message() -> None:
    """C42."""
    async with serving(tokenizer=partial(TemplateTokenizer, CHARACTERS)) as server:
        body = {"messages": [U, says("user", ""), U]}
        await assert_refused(server.client, CHAT, body, "messages.1", "template")


async def test_a_chat_that_renders_to_nothing_is_refused() -> None:
    """C15: no token to start from."""
    async with serving(tokenizer=partial(TemplateTokenizer, "")) as server:
        await assert_refused(server.client, CHAT, {"messages": [U]}, "messages", "no token")
