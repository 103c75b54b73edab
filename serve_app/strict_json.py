"""Request bodies as JSON that means one thing: no key twice, no NaN, nothing too deep."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from serve_app.errors import ApiError


class StrictJsonRoute(APIRoute):
    """A route whose JSON bodies are read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """The value of a JSON text. Raises ApiError 400 saying what is wrong with it."""
    try:
        return json.loads(
            body.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of too many digits
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ApiError(400, f"{key} is given twice", param=key)
        values[key] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
