"""Limits on what a client may send before anything reads it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ApiError


class LimitBody:
    """ASGI middleware: a request body over `max_bytes` is answered 413 and not kept.

    A client that leaves before its body is whole has asked nothing.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        num_bytes = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            messages.append(message)
            num_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
            if num_bytes > self._max_bytes:
                error = ApiError(413, f"the body is larger than {self._max_bytes} bytes")
                await error.response()(scope, receive, send)
                return
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)
