"""API keys: who may use the endpoint. Only digests of the keys are kept."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.config import KEY_VARIABLE
from serve_app.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})  # for probes, which have no key
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_MIN_CHARS = 16


def key_digests(file: str | None, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """SHA-256 of every accepted key: the lines of the file, and the environment's.

    Raises ValueError if the file cannot be read or holds no key, or if a key is short enough to
    be guessed or cannot come in a header.
    """
    keys: list[str] = []
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"http.api_key_file: cannot read {file}: {error}") from None
        keys += [line.strip() for line in lines if line.strip()]
        if not keys:
            raise ValueError(f"http.api_key_file: {file} holds no key")
    if KEY_VARIABLE in environment:
        keys.append(environment[KEY_VARIABLE].strip())
    for key in keys:
        if len(key) < _MIN_CHARS:
            raise ValueError(f"an API key must have at least {_MIN_CHARS} characters")
        # a header would not bring it unchanged; and a line with spaces is a comment, not a key
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError("an API key must consist of printable ASCII characters but spaces")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


class RequireKey:
    """ASGI middleware: 401 unless the request carries an accepted key as a bearer token.

    Without any key, requests to a loopback address and name pass, and others only if `anonymous`.
    The name counts because a web page may have its own name point to loopback (DNS rebinding). What
    a proxy forwards came from elsewhere, whatever address and name the proxy uses.
    """

    def __init__(self, app: ASGIApp, digests: tuple[bytes, ...], anonymous: bool) -> None:
        self._app = app
        self._digests = digests
        self._anonymous = anonymous

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path not in OPEN_PATHS:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if not self._digests:
            if self._anonymous or _is_loopback(scope):
                return None
            return _unauthorized(
                "this server has no API key, and the request did not come straight to localhost; "
                f"its operator must set {KEY_VARIABLE} or http.api_key_file, "
                "or http.allow_anonymous=true"
            )
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            return _unauthorized("an API key is required: Authorization: Bearer <key>")
        if not self._accepts(key.strip()):
            return _unauthorized("the API key is not valid", code="invalid_api_key")
        return None

    def _accepts(self, key: str) -> bool:
        given = hashlib.sha256(key.encode()).digest()
        accepted = False
        for digest in self._digests:  # all of them, so that the time does not tell which
            accepted |= hmac.compare_digest(given, digest)
        return accepted


def _unauthorized(message: str, code: str | None = None) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def _is_loopback(scope: Scope) -> bool:
    """Whether the request came in at a loopback address of this machine, and meant it."""
    server = scope.get("server")
    headers = Headers(scope=scope)
    if any(name in headers for name in _FORWARDED):
        return False
    host = headers.get("host", "").lower()
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    at_loopback = server is not None and _is_loopback_address(server[0])
    return at_loopback and (name in ("", "localhost") or _is_loopback_address(name.strip("[]")))


def _is_loopback_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:  # a name, or a Unix socket
        return False
