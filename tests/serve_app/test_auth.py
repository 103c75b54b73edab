"""Who may use the endpoint: keys, loopback, probes, and pages of other origins."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from serve_app.auth import key_digests
from tests.serve_app.server import Server, serving

KEY, OTHER = "k" * 40, "another-key-of-some-length"
BODY = {"prompt": "a", "max_tokens": 2}
ELSEWHERE = "http://192.0.2.7"


def digests(*keys: str) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


@pytest.fixture
async def keyed() -> AsyncGenerator[Server, None]:
    """A server with two keys, reached from elsewhere."""
    async with serving(base_url=ELSEWHERE, key_digests=digests(KEY, OTHER)) as server:
        yield server


async def ask(client: httpx.AsyncClient, authorization: str | bytes | None) -> httpx.Response:
    headers = {} if authorization is None else {b"authorization": authorization}
    return await client.post("/v1/completions", json=BODY, headers=headers)  # type: ignore[arg-type]


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n  {OTHER}  \n")
    found = key_digests(str(file), {"OUTRIDER_API_KEY": "from-the-environment"})
    assert found == digests(KEY, OTHER, "from-the-environment")
    assert key_digests(None, {}) == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), (b"\xff\xfe\x00", "cannot read"), (b" \n", "no key"), (b"short", "16")],
)
def test_a_file_without_a_usable_key_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        key_digests(str(file), {})
    assert "short" not in str(refused.value).replace("short enough", "")


def test_a_short_or_empty_key_of_the_environment_is_refused() -> None:
    for key in ("", "0123456789"):
        with pytest.raises(ValueError, match="16"):
            key_digests(None, {"OUTRIDER_API_KEY": key})


@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_every_key_opens(keyed: Server, scheme: str, key: str) -> None:
    assert (await ask(keyed.client, f"{scheme} {key}")).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY}{OTHER}",
        f"Bearer {KEY} {OTHER}",
        b"Bearer \xff\xfe",
        "Bearer " + hashlib.sha256(KEY.encode()).hexdigest(),
    ],
)
async def test_anything_else_is_unauthorized(
    keyed: Server, given: str | bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    response = await ask(keyed.client, given)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "authentication_error"
    assert KEY not in response.text + caplog.text


async def test_only_probes_need_no_key(keyed: Server) -> None:
    for path in ("/health", "/ready"):
        assert (await keyed.client.get(path)).status_code == 200
    for path in ("/v1/models", "/docs", "/openapi.json", "/v2", "/health/", "//health", "/HEALTH"):
        assert (await keyed.client.get(path)).status_code == 401, path


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000", "http://127.9.9.9"])
async def test_on_loopback_no_key_is_asked_for_by_default(url: str) -> None:
    async with serving(base_url=url) as server:
        assert (await ask(server.client, None)).status_code == 200


@pytest.mark.parametrize("url", [ELSEWHERE, "http://[2001:db8::1]", "http://0.0.0.0", "http://box"])
async def test_elsewhere_a_server_without_a_key_serves_nobody(url: str) -> None:
    async with serving(base_url=url) as server:
        response = await server.client.post(
            "/v1/completions", json=BODY, headers={"host": "127.0.0.1", "authorization": "Bearer x"}
        )
        assert response.status_code == 401
        assert "OUTRIDER_API_KEY" in response.json()["error"]["message"]
        assert (await server.client.get("/ready")).status_code == 200


async def test_elsewhere_anonymous_clients_are_served_where_the_operator_says_so() -> None:
    async with serving(base_url=ELSEWHERE, **{"http.allow_anonymous": True}) as server:
        assert (await ask(server.client, None)).status_code == 200


async def test_pages_of_other_origins_are_not_let_in_by_default(keyed: Server) -> None:
    headers = {"origin": "https://a.example", "authorization": f"Bearer {KEY}"}
    response = await keyed.client.post("/v1/completions", json=BODY, headers=headers)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [("https://a.example", True), ("https://b.example", True), ("https://c.example", False)],
)
async def test_pages_of_the_named_origins_may_ask_first_and_then_need_the_key(
    origin: str, allowed: bool
) -> None:
    origins = {"http.cors_origins": "https://a.example,https://b.example"}
    async with serving(base_url=ELSEWHERE, key_digests=digests(KEY), **origins) as server:
        preflight = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        first = await server.client.options("/v1/completions", headers=preflight)
        assert (first.status_code == 200) is allowed
        for key, status in ((KEY, 200), (OTHER, 401)):
            headers = {"origin": origin, "authorization": f"Bearer {key}"}
            response = await server.client.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == status
            told = response.headers.get("access-control-allow-origin")
            assert told == (origin if allowed else None)
