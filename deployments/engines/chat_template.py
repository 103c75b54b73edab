"""Chat messages to prompt text, remembering which of it came from the template.

Only the template's own text may spell control tokens. Knows no tokenizer and no model.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployments.engines.protocol import ChatTemplateError

Message = Mapping[str, str]

_MARK = "[0-9a-f]{32}"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the prompt; control tokens are recognised in it only if `from_template`."""

    text: str
    from_template: bool


class ChatTemplate:
    """A model's Jinja template; `control` matches every string that spells a control token."""

    def __init__(self, source: str, control: re.Pattern[str], bos: str, eos: str) -> None:
        self._source = source
        self._control = control
        self._globals = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True}

    def spans(self, messages: Sequence[Message]) -> list[Span]:
        """The prompt's spans, in order; their texts joined are what the template renders.

        Raises ChatTemplateError if the template refuses the messages, or if it rewrites contents
        (beyond stripping white space) and one of them spells a control token.
        """
        for index, message in enumerate(messages):
            if not re.fullmatch(r"\w+", message.get("role", "")):
                reason = f"role must be one word, got {message.get('role')!r}"
                raise ChatTemplateError(reason, index)
        try:
            text = self._render(messages)
        except ChatTemplateError as error:
            raise ChatTemplateError(str(error), self._first_refused(messages)) from error
        marked, contents = _mark(messages)
        pieces = _split(self._render(marked), contents)
        spans = _align(pieces, contents, text)
        if spans is not None:
            return spans
        own = [match for piece in pieces[::2] for match in self._control.findall(piece)]
        if self._control.findall(text) != own:
            raise ChatTemplateError(
                "the chat template rewrites contents, and one of them spells a control token"
            )
        return [Span(text, from_template=True)]

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(messages=messages)
        except Exception as error:  # whatever a model's file makes of the messages
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error

    def _first_refused(self, messages: Sequence[Message]) -> int | None:
        """The message after a beginning that is accepted, as long a one as a few trials find.

        Looked for from the end: a template may refuse the last message only because it is the last.
        """
        accepted, refused, cut = 0, len(messages), 1
        while cut < len(messages):
            if self._accepts(messages[:-cut]):
                accepted = len(messages) - cut
                break
            refused, cut = len(messages) - cut, 2 * cut
        while refused - accepted > 1:
            middle = (accepted + refused) // 2
            if self._accepts(messages[:middle]):
                accepted = middle
            else:
                refused = middle
        return refused - 1 if messages else None

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages)
        except ChatTemplateError:
            return False
        return True

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= self._globals | {"raise_exception": _refuse}
        return environment.from_string(self._source)


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _mark(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """The messages with every content replaced by a mark, and the contents by mark.

    No content can hold a mark, since marks are drawn anew. Empty contents stay, because templates
    test for them; so does the role, which is a plain word.
    """
    contents: dict[str, str] = {}

    def mark(key: str, value: str) -> str:
        if key == "role" or not value:
            return value
        contents[token := secrets.token_hex(16)] = value
        return token

    marked: list[Message] = [
        {key: mark(key, value) for key, value in message.items()} for message in messages
    ]
    return marked, contents


def _split(rendered: str, contents: Mapping[str, str]) -> list[str]:
    """Template text and marks in turn; the first and the last are template text."""
    if not contents:
        return [rendered]
    pieces = re.split(f"({_MARK})", rendered)
    # the template's own text may hold what looks like a mark; it is joined again
    at = 1
    while at < len(pieces):
        if pieces[at] in contents:
            at += 2
        else:
            pieces[at - 1 : at + 2] = ["".join(pieces[at - 1 : at + 2])]
    return pieces


def _align(pieces: Sequence[str], contents: Mapping[str, str], text: str) -> list[Span] | None:
    """The spans of `text`, or None if it is not the pieces with the contents put in.

    A template may strip a content's white space (Llama 3 does), which a mark does not show.
    """
    spans = [Span(pieces[0], from_template=True)]
    at = len(pieces[0])
    for mark, following in zip(pieces[1::2], pieces[2::2], strict=True):
        value = contents[mark]
        shapes = (value, value.strip(), value.lstrip(), value.rstrip())
        shape = next((s for s in shapes if text.startswith(s + following, at)), None)
        if shape is None:
            return None
        spans += [Span(shape, from_template=False), Span(following, from_template=True)]
        at += len(shape) + len(following)
    return spans if "".join(span.text for span in spans) == text else None
