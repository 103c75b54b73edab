"""Errors as the OpenAI API words them: one object, one table of statuses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException


class ApiError(Exception):
    """An error that the client is told; `param` names the field of the request at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self._type(),
                "param": self.param,
                "code": self.code,
            }
        }

    def _type(self) -> str:
        if self.status == 404:
            return "not_found_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "5"} if self.status == 503 else None
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failed request with an OpenAI error object."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return _from_validation(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "internal error").response()


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first fault, naming the field: `messages.0.content: Input should be a valid string`."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}")
    # pydantic names the member of a union that it tried; a client knows only the field
    location = [str(part) for part in first["loc"][1:] if part != "str" and "[" not in str(part)]
    param = ".".join(location) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")
    return ApiError(400, f"{param or 'body'}: {first['msg']}", param=param)
