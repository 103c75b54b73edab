"""Who may use the endpoint: keys, loopback, probes, and pages of other origins."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

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
    [
        (None, "http.api_key_file: cannot read"),
        (b"\xff\xfe\x00", "http.api_key_file: cannot read"),
        (b"", "http.api_key_file: .* no key"),
        (b" \n", "http.api_key_file: .* no key"),
        (b"short", "at least 16"),
        (KEY.encode() + b"\nshort", "at least 16"),
    ],
)
def test_a_file_without_a_usable_key_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        key_digests(str(file), {})
    assert "short" not in str(refused.value)


def test_a_short_or_empty_key_of_the_environment_is_refused() -> None:
    for key in ("", "0123456789"):
        with pytest.raises(ValueError, match="16"):
            key_digests(None, {"OUTRIDER_API_KEY": key})


@pytest.mark.parametrize(
    "content",
    [f"\ufeff{KEY}", "é" * 20, KEY + "à", KEY + "\x07", "# keys of production", f"{KEY} # mine"],
)
def test_a_key_that_no_header_can_bring_is_refused_and_not_told(
    tmp_path: Path, content: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    for source in ((str(file), {}), (None, {"OUTRIDER_API_KEY": content})):
        with pytest.raises(ValueError, match="ASCII") as refused:
            key_digests(*source)
        assert content not in str(refused.value)


def test_two_lines_are_not_one_key_of_the_environment_but_a_line_end_is_no_part_of_it() -> None:
    assert key_digests(None, {"OUTRIDER_API_KEY": f" {KEY}\n"}) == digests(KEY)
    with pytest.raises(ValueError, match="ASCII"):
        key_digests(None, {"OUTRIDER_API_KEY": f"{KEY}\n{OTHER}"})


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", "é" * 20, " " * 20])
async def test_a_key_of_the_environment_opens_or_is_refused_at_the_start(key: str) -> None:
    """Else its operator has a server that answers nobody, and no word of why."""
    try:
        found = key_digests(None, {"OUTRIDER_API_KEY": key})
    except ValueError:
        return
    async with serving(base_url=ELSEWHERE, key_digests=found) as server:
        response = await ask(server.client, f"Bearer {key.strip()}".encode())
        assert response.status_code == 200


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
async def test_anything_else_is_unauthorized(keyed: Server, given: str | bytes | None) -> None:
    response = await ask(keyed.client, given)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "authentication_error"


async def test_the_code_tells_a_wrong_key_from_none(keyed: Server) -> None:
    for given, code in ((f"Bearer {KEY[:-1]}", "invalid_api_key"), (None, None)):
        assert (await ask(keyed.client, given)).json()["error"]["code"] == code


async def test_no_key_nor_its_digest_is_ever_told(
    keyed: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one that opens nor one that does not, in a body, a header or a log record."""
    caplog.set_level(logging.DEBUG)
    wrong = "a-wrong-key-of-some-length"
    told = []
    for key in (KEY, OTHER, wrong):
        for scheme in ("Bearer", "Basic"):
            response = await ask(keyed.client, f"{scheme} {key}")
            told.append(response.text + str(response.headers))
    told += [str(record.__dict__) + record.getMessage() for record in caplog.records]
    assert any("serve_app.telemetry" in text for text in told)
    for key in (KEY, OTHER, wrong):
        digest = hashlib.sha256(key.encode())
        for secret in (key, digest.hexdigest(), str(digest.digest())):
            assert not any(secret in text for text in told)


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
        for setting in ("OUTRIDER_API_KEY", "http.api_key_file", "http.allow_anonymous=true"):
            assert setting in response.json()["error"]["message"]
        assert (await server.client.get("/ready")).status_code == 200


@pytest.mark.parametrize("address", [None, ("/run/outrider.sock", None), ("", 80)])
async def test_where_a_request_came_in_must_be_known_to_be_loopback(
    address: tuple[str, int | None] | None,
) -> None:
    """A Unix socket, whose other end may be a proxy, and a server that does not say."""
    async with serving() as server:

        async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
            await server.app({**scope, "server": address}, receive, send)

        transport = httpx.ASGITransport(elsewhere)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            response = await ask(client, None)
            assert response.status_code == 401
            assert "http.api_key_file" in response.json()["error"]["message"]
            assert (await client.get("/health")).status_code == 200


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
            # what the official JavaScript client sends
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        first = await server.client.options("/v1/completions", headers=preflight)
        assert (first.status_code == 200) is allowed
        for key, status in ((KEY, 200), (OTHER, 401)):
            headers = {"origin": origin, "authorization": f"Bearer {key}"}
            response = await server.client.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == status
            told = response.headers.get("access-control-allow-origin")
            assert told == (origin if allowed else None)
            if allowed:
                exposed = response.headers["access-control-expose-headers"]
                assert exposed == "x-request-id, retry-after"


async def test_spaces_around_the_commas_between_origins_change_nothing() -> None:
    async with serving(**{"http.cors_origins": "https://a.example, https://b.example"}) as server:
        headers = {"origin": "https://b.example"}
        response = await server.client.post("/v1/completions", json=BODY, headers=headers)
        assert response.headers.get("access-control-allow-origin") == "https://b.example"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "[::1]", "LocalHost"]
)
async def test_loopback_goes_by_its_own_names(host: str) -> None:
    async with serving() as server:
        headers = {"host": host}
        response = await server.client.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
async def test_a_web_page_cannot_reach_loopback_by_a_name_of_its_own(host: str) -> None:
    """DNS rebinding: the browser takes the page and the server for one origin."""
    async with serving() as server:
        headers = {"host": host, "origin": f"http://{host}"}
        response = await server.client.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 401


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Forwarded", "Via"]
)
async def test_what_a_proxy_forwards_to_loopback_came_from_elsewhere(header: str) -> None:
    """nginx puts its own name for the upstream into Host, so that alone does not tell."""
    for allowed, status in ((False, 401), (True, 200)):
        async with serving(**{"http.allow_anonymous": allowed}) as server:
            headers = {"host": "127.0.0.1:8000", header: "192.0.2.9"}
            response = await server.client.post("/v1/completions", json=BODY, headers=headers)
            assert response.status_code == status


async def test_a_page_of_a_named_origin_can_read_a_defect_too() -> None:
    async with serving(**{"http.cors_origins": "https://a.example"}) as server:

        def broken(*_: object) -> None:
            raise RuntimeError("a defect")

        server.driver.open = broken  # type: ignore[assignment,method-assign]
        headers = {"origin": "https://a.example"}
        response = await server.client.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 500
        assert response.headers["access-control-allow-origin"] == "https://a.example"
