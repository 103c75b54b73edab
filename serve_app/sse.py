"""Server-sent events, as the OpenAI API streams them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = "data: [DONE]\n\n"
_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}  # JSON escapes the others


def event(payload: Mapping[str, Any]) -> str:
    """One event on one line, for clients too that know more line breaks than the format does."""
    data = json.dumps(payload, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    return f"data: {data}\n\n"


class EventStream(StreamingResponse):
    """Streams events, and closes their generator at once when the client goes away.

    `on_end` is called once, however the response ends, begun or not.
    """

    def __init__(self, events: AsyncGenerator[str, None], on_end: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)
