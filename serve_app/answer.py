"""One generation as an OpenAI response: a whole body, or server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from deployments.driver import Generation
from policies.events import Finish
from policies.types import FinishReason
from serve_app.errors import ApiError
from serve_app.sse import DONE, event
from serve_app.text import TextStream


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between the two endpoints: names, and where the text goes."""

    id_prefix: str
    whole: str
    chunk: str
    chat: bool

    def text_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        body = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {"index": 0, **body, "finish_reason": finish_reason, "logprobs": None}

    def delta_choice(self, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        body = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return {"index": 0, **body, "finish_reason": finish_reason, "logprobs": None}


CHAT = Shape("chatcmpl-", "chat.completion", "chat.completion.chunk", chat=True)
COMPLETION = Shape("cmpl-", "text_completion", "text_completion", chat=False)


class Answer:
    """One generation, told as a stream of events or as a whole."""

    def __init__(
        self,
        *,
        generation: Generation,
        text: TextStream,
        model: str,
        num_prompt_tokens: int,
        off: bool,
        shape: Shape,
    ) -> None:
        self._generation = generation
        self._text = text
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._off = off
        self._shape = shape
        self._created = int(time.time())
        self._finish_reason: str | None = None

    async def whole(self) -> dict[str, Any]:
        """The response body. Raises ApiError if the generation failed."""
        text = "".join([piece async for piece in self._pieces()])
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }
        choice = self._shape.text_choice(text, self._finish_reason)
        return self._frame(self._shape.whole, choice) | {
            "usage": usage,
            "outrider": self._report(),
        }

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events; an error ends them without [DONE]."""
        try:
            if self._shape.chat:
                yield self._chunk({"role": "assistant", "content": ""})
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if piece:
                        yield self._chunk({"content": piece})
        except ApiError as error:
            yield event(error.body())
            return
        choice = self._shape.delta_choice({}, self._finish_reason)
        yield event(self._frame(self._shape.chunk, choice) | {"outrider": self._report()})
        yield DONE

    async def _pieces(self) -> AsyncGenerator[str, None]:
        """Text as it becomes certain; afterwards the finish reason is known."""
        async with aclosing(self._generation.stream()) as stream:
            async for item in stream:
                if isinstance(item, Finish):
                    yield self._end(item)
                    return
                piece = ""
                for token_id in item.ids:
                    self._num_tokens += 1
                    piece += self._text.push(token_id)
                    if self._text.stopped:
                        break
                yield piece
                if self._text.stopped:
                    self._finish_reason = "stop"
                    return

    def _end(self, finish: Finish) -> str:
        if finish.reason is FinishReason.ERROR:
            raise ApiError(500, f"generation failed: {finish.error}")
        self._finish_reason = finish.reason.value
        return self._text.finish()

    def _chunk(self, delta: dict[str, str]) -> str:
        return event(self._frame(self._shape.chunk, self._shape.delta_choice(delta, None)))

    def _frame(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._shape.id_prefix + self._generation.name,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": [choice],
        }

    def _report(self) -> dict[str, Any]:
        metrics = self._generation.metrics
        speculating = "speculative" if self._generation.speculating else "degraded"
        return {
            "mode": "off" if self._off else speculating,
            "rounds": metrics.rounds,
            "drafted": metrics.drafted,
            "accepted": metrics.accepted,
            "acceptance_rate": metrics.acceptance_rate,
            "tpt_ms": metrics.tpt_ms,
            "ttft_ms": metrics.ttft_ms,
        }
