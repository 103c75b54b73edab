"""`outrider chat` and `outrider bench` as commands: streams, errors, exit statuses."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from serve_app import cli
from serve_app.bench import prompts
from tests.serve_app.fake_endpoint import URL, Body, FakeEndpoint, best, error, install, stream_of

Run = Callable[..., tuple[int, str, str]]
JSON_KEYS = {
    *("dataset", "max_tokens", "model", "requests", "tokens", "errors", "degraded"),
    *("ttft_ms", "tpt_ms", "tpot_ms", "itl_p95_ms"),
    *("baseline_ttft_ms", "baseline_tpt_ms", "baseline_tpot_ms", "baseline_itl_p95_ms"),
    *("acceptance_rate", "acceptance_len", "acceptance_by_position"),
    *("navs_per_token", "bytes_per_token", "speedup", "speedup_quartiles"),
    *("identical", "near_ties", "mismatches", "compared"),
}


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line with this stdin; returns exit status, stdout and stderr."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEndpoint:
    fake = FakeEndpoint()
    install(fake, monkeypatch)
    return fake


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """HumanEval is a file of six prompts; returns the arguments that name its folder."""
    content = "\n".join(json.dumps({"prompt": f"prompt {i}"}) for i in range(6)).encode()
    (tmp_path / "toy.jsonl").write_bytes(content)
    toy = prompts.Dataset(
        name="humaneval",
        file="toy.jsonl",
        sha256=hashlib.sha256(content).hexdigest(),
        source="nowhere",
        chat=False,
        select=lambda records: [record["prompt"] for record in records],
    )
    monkeypatch.setitem(prompts.DATASETS, "humaneval", toy)
    return ["--data", str(tmp_path)]


# ---- chat


def test_stdout_has_the_answer_only(fake: FakeEndpoint, outrider: Run) -> None:
    status, out, err = outrider("chat", "hello", "there", "--url", URL, "--max-tokens", "2")
    assert (status, out.count("w"), out.count("\n")) == (0, 2, 1)
    legend, summary = err.splitlines()
    assert legend.startswith("accepted draft tokens")
    assert summary == "2 tokens · 10.0 ms per token · mode: speculative"


def test_the_options_reach_the_request(fake: FakeEndpoint, outrider: Run) -> None:
    options = ["--system", "be brief", "--max-tokens", "5", "--temperature", "0.5", "--seed", "7"]
    outrider("chat", "--url", f"{URL}/v1/", *options, "--method", "off", "hello", "there")
    (body,) = fake.requests
    assert body == {
        "path": "/v1/chat/completions",
        "model": "toy-target",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello there"},
        ],
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 7,
        "stream": True,
        "outrider": {"method": "off", "tokens": True},
    }


def test_a_piped_stdin_is_one_message(fake: FakeEndpoint, outrider: Run) -> None:
    status, out, _ = outrider("chat", stdin="two\nlines é\n".encode() + b"\xff")
    assert (status, out.count("\n")) == (0, 1)
    assert fake.requests[0]["messages"] == [{"role": "user", "content": "two\nlines é\n\ufffd"}]


def test_an_argument_that_is_no_utf8_is_sent_with_a_replacement(
    fake: FakeEndpoint, outrider: Run
) -> None:
    assert outrider("chat", "a\udcffb")[0] == 0
    assert fake.requests[0]["messages"][0]["content"] == "a?b"


@pytest.mark.parametrize("arguments", [[], [""]])
def test_an_empty_message_is_refused(
    fake: FakeEndpoint, outrider: Run, arguments: list[str]
) -> None:
    assert outrider("chat", *arguments) == (1, "", "outrider: the message is empty\n")


def test_no_color_means_no_escape_sequence_even_on_a_terminal(
    fake: FakeEndpoint, outrider: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = outrider("chat", "hello")
    assert "\x1b[" in out
    assert "\x1b[" in err
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, err = outrider("chat", "hello")
    assert "\x1b" not in out + err


@pytest.mark.parametrize(("key", "sent"), [("secret", "secret"), ("", "none"), (None, "none")])
def test_the_api_key_comes_from_the_environment(
    fake: FakeEndpoint,
    outrider: Run,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    sent: str,
) -> None:
    if key is not None:
        monkeypatch.setenv("OUTRIDER_API_KEY", key)
    outrider("chat", "hello")
    assert {headers["authorization"] for headers in fake.headers} == {f"Bearer {sent}"}


def test_ctrl_c_ends_a_single_answer_with_an_error_status(
    fake: FakeEndpoint, outrider: Run
) -> None:
    def events() -> Iterator[bytes]:
        yield from stream_of({"delta": {"content": "so far"}}).iter_raw()
        raise KeyboardInterrupt

    headers = {"content-type": "text/event-stream"}
    fake.fail = lambda _body: httpx.Response(200, headers=headers, content=events())
    status, out, err = outrider("chat", "hello")
    assert status != 0
    assert out == "so far\n"
    assert "stopped after 0 tokens" in err


# ---- what goes wrong


def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("[Errno 111] Connection refused", request=request)


@pytest.mark.parametrize("command", [["chat", "hello"], ["bench"]])
def test_no_connection_says_what_to_start(
    outrider: Run, monkeypatch: pytest.MonkeyPatch, dataset: list[str], command: list[str]
) -> None:
    install(refused, monkeypatch)
    if command == ["bench"]:
        command = [*command, *dataset]
    said = "([Errno 111] Connection refused); `make serve` starts an endpoint"
    assert outrider(*command, "--url", URL) == (1, "", f"outrider: no answer from {URL} {said}\n")


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (error(503, "still loading: draft"), "still loading: draft"),
        (error(401, "wrong key"), "wrong key; the key is taken from $OUTRIDER_API_KEY"),
        (error(400, "two\nlines \x1b[2J"), "two lines [2J"),
        (stream_of({"delta": {"content": ""}}), "the answer ended without the report"),
        (httpx.Response(502, text="<html>bad gateway</html>"), "Error code: 502"),
        (
            httpx.Response(
                200,
                headers={"content-type": "text/event-stream"},
                content=b'data: {"error": {"message": "generation failed"}}\n\n',
            ),
            "generation failed",
        ),
        (
            httpx.Response(
                200, headers={"content-type": "text/event-stream"}, content=b"data: {\n\n"
            ),
            "answers with broken JSON: ",
        ),
        (
            stream_of({"delta": {}, "outrider": {"tokens": [{"id": "x"}]}}),
            "is no Outrider endpoint of this version: ChoiceExtension.tokens.0.id: ",
        ),
    ],
)
def test_an_error_of_the_endpoint_is_one_line(
    fake: FakeEndpoint, outrider: Run, response: httpx.Response, said: str
) -> None:
    fake.fail = lambda _body: response
    status, out, err = outrider("chat", "hello", "--url", URL)
    assert (status, out) == (1, "")
    message = err.splitlines()[1:]  # below the legend
    assert len(message) == 1
    assert message[0].startswith(f"outrider: {URL}")
    assert said in message[0]


def test_a_connection_that_breaks_off_leaves_what_came_and_says_so(
    fake: FakeEndpoint, outrider: Run
) -> None:
    def events() -> Iterator[bytes]:
        yield from stream_of({"delta": {"content": "so far"}}).iter_raw()
        raise httpx.ReadError("connection reset by peer")

    headers = {"content-type": "text/event-stream"}
    fake.fail = lambda _body: httpx.Response(200, headers=headers, content=events())
    status, out, err = outrider("chat", "hello", "--url", URL)
    assert (status, out) == (1, "so far\n")
    assert f"outrider: {URL} broke off its answer (connection reset by peer)" in err


@pytest.mark.parametrize(
    "answer", [httpx.Response(200, text="<html>"), httpx.Response(200, json={"data": []})]
)
def test_a_server_of_another_kind_is_told(
    outrider: Run, monkeypatch: pytest.MonkeyPatch, answer: httpx.Response
) -> None:
    install(lambda _request: answer, monkeypatch)
    status, out, err = outrider("chat", "hello", "--url", URL)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"outrider: {URL} is no Outrider endpoint of this version: Models")


def test_nothing_is_asked_twice(fake: FakeEndpoint, outrider: Run) -> None:
    fake.fail = lambda _body: error(503, "busy")
    outrider("chat", "hello")
    assert len(fake.requests) == 1


# ---- bench


def test_bench_prints_set_up_table_and_one_json_line_last(
    fake: FakeEndpoint, outrider: Run, dataset: list[str]
) -> None:
    status, out, err = outrider("bench", *dataset, "--max-tokens", "7", "--limit", "3")
    assert (status, err) == (0, "")
    assert "toy-target" in out
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["method", "off", "speculative"]
    result = json.loads(out.splitlines()[-1])
    assert set(result) == JSON_KEYS
    counts = ("requests", "tokens", "compared", "identical", "mismatches", "errors", "max_tokens")
    assert [result[key] for key in counts] == [3, 21, 21, 21, 0, 0, 7]


def test_bench_json_leaves_one_line_on_stdout(
    fake: FakeEndpoint, outrider: Run, dataset: list[str]
) -> None:
    status, out, err = outrider("bench", *dataset, "--max-tokens", "7", "--json")
    assert (status, out.count("\n")) == (0, 1)
    assert json.loads(out)["requests"] == 6
    assert "speculative" in err


def test_bench_takes_prompts_evenly_from_the_whole_set(
    fake: FakeEndpoint, outrider: Run, dataset: list[str]
) -> None:
    outrider("bench", *dataset, "--limit", "3", "--max-tokens", "2")
    asked = dict.fromkeys(body["prompt"] for body in fake.requests)
    assert list(asked) == ["prompt 0", "prompt 2", "prompt 4"]


def test_bench_fails_if_a_token_is_not_the_targets(
    fake: FakeEndpoint, outrider: Run, dataset: list[str]
) -> None:
    fake.emit = lambda ids: best(ids) + 7 if len(ids) == 12 else best(ids)
    status, out, _ = outrider("bench", *dataset, "--max-tokens", "7", "--json")
    result = json.loads(out)
    assert status == 1
    assert result["mismatches"] == 6
    assert result["identical"] + result["mismatches"] == result["compared"] == result["tokens"]


def test_bench_goes_on_after_a_failed_prompt_and_fails_in_the_end(
    fake: FakeEndpoint, outrider: Run, dataset: list[str]
) -> None:
    def fail(body: Body) -> httpx.Response | None:
        return error(400, "too long") if body["prompt"] == "prompt 3" else None

    fake.fail = fail
    status, out, err = outrider("bench", *dataset, "--max-tokens", "7", "--json", "--url", URL)
    result = json.loads(out)
    assert status == 1
    assert (result["requests"], result["errors"], result["tokens"]) == (5, 1, 35)
    assert f"a prompt failed: {URL}: too long\n" in err


def test_bench_without_any_answer_is_an_error(
    fake: FakeEndpoint, outrider: Run, dataset: list[str]
) -> None:
    fake.fail = lambda _body: error(500, "generation failed")
    status, out, err = outrider("bench", *dataset, "--json", "--url", URL)
    assert (status, out) == (1, "")
    last = err.splitlines()[-1]
    assert last == f"outrider: all 6 prompts failed; the last one: {URL}: generation failed"


def test_bench_names_a_missing_data_set(
    fake: FakeEndpoint, outrider: Run, dataset: list[str], tmp_path: Path
) -> None:
    (tmp_path / "toy.jsonl").unlink()
    status, out, err = outrider("bench", *dataset)
    assert (status, out) == (1, "")
    assert err.startswith("outrider: there is no toy.jsonl in\n")


def test_starting_the_command_line_loads_no_openai_client(outrider: Run) -> None:
    code = "import sys, serve_app.cli; sys.exit('openai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
