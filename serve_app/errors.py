"""Errors as the OpenAI API words them: one object, one table of statuses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

_MAX_CHARS = 500  # of what an error repeats of a request

_TYPES = {401: "authentication_error", 404: "not_found_error"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is no success, but for /ready's."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error that the client is told; `param` names the field of the request at fault.

    An HTTPException, because FastAPI lets no other error out of the reading of a body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, _printable(message), headers)
        self.param = None if param is None else _printable(param)
        self.code = code

    def __str__(self) -> str:
        return str(self.detail)

    def body(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status_code < 500 else "server_error"
        detail = ErrorDetail(
            message=self.detail,
            type=_TYPES.get(self.status_code, default),
            param=self.param,
            code=self.code,
        )
        return ErrorBody(error=detail).model_dump()

    def response(self) -> JSONResponse:
        headers = dict(self.headers or {})
        if self.status_code == 503:
            headers.setdefault("Retry-After", "5")
        return JSONResponse(self.body(), status_code=self.status_code, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failed request with an OpenAI error object."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return _from_validation(error).response()

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), headers=headers).response()


def _printable(text: str) -> str:
    """Lone surrogates, which no response can carry, become question marks; of bounded length."""
    text = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "…"
    return text.encode(errors="replace").decode()


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first fault, naming the field: `messages.0.content: Input should be a valid string`."""
    first = error.errors()[0]
    *path, last = first["loc"]
    no_object = first["type"] == "model_attributes_type"
    if no_object and not path:
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    # pydantic names the member of a union that it tried; a client knows only the field
    location = [str(part) for part in path[1:] if part != "str" and "[" not in str(part)]
    if first["type"] == "extra_forbidden":  # its last part is the client's own word
        name = ".".join([*location, str(last)])
        return ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
    if path and last != "str" and "[" not in str(last):
        location.append(str(last))
    param = ".".join(location) or None
    reason = "must be a JSON object" if no_object else first["msg"]
    return ApiError(400, f"{param or 'body'}: {reason}", param=param)
