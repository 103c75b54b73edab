"""The trace format: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.traces import VERSION, PromptTrace, Trace, TraceError, read, write
from tests.policies.traces import prompt_trace, toy_trace


def same(one: PromptTrace, other: PromptTrace) -> bool:
    pairs = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(PromptTrace))
    return all(np.array_equal(a, b) for a, b in pairs)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = toy_trace()
    write(trace, tmp_path / "t.npz")
    again = read(tmp_path / "t.npz")
    for name in ("draft", "target", "max_tokens", "end_ids"):
        assert getattr(again, name) == getattr(trace, name)
    assert len(again.prompts) == len(trace.prompts)
    assert all(map(same, again.prompts, trace.prompts))


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.npz", "other.npz"):
        write(toy_trace(), tmp_path / name)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "other.npz").read_bytes()


def test_each_split_of_each_data_set_is_found() -> None:
    trace = toy_trace(prompts=2)
    assert trace.datasets == ("toy",)
    assert [p.split for p in trace.of("toy", "tune")] == ["tune"] * 2
    assert [p.index for p in trace.of("toy", "evaluate")] == [0, 1]
    assert trace.of("other", "tune") == ()


def test_a_roll_out_belongs_to_each_mismatch() -> None:
    trace = prompt_trace([True, False, True, False, False])
    assert trace.mismatches.tolist() == [1, 3, 4]
    assert len(trace.rollouts) == 3


def archive(path: Path, header: dict[str, Any] | None = None, **arrays: Any) -> Path:
    """A written toy trace with parts of it replaced; None leaves an array out."""
    write(toy_trace(), path)
    with np.load(path) as written:
        parts = {name: written[name] for name in written}
    told = json.loads(bytes(parts["header"])) | (header or {})
    parts["header"] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    parts |= arrays
    with path.open("wb") as file:
        np.savez_compressed(file, **{k: v for k, v in parts.items() if v is not None})
    return path


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"header": {"version": VERSION + 1}}, "version"),
        ({"header": {"prompts": []}}, "arrays"),
        ({"header": {"prompts": [["toy", "tune", 0, 3]]}}, "values to unpack"),
        ({"header": {"prompts": [["toy", "mine", 0, 3, 24]]}}, "mine"),
        ({"header": {"prompts": [["toy", "tune", -1, 3, 24]]}}, "-1"),
        ({"confidences": None}, "confidences"),
        ({"confidences": np.ones(144, np.float64)}, "confidences"),
        ({"confidences": np.full(144, np.nan, np.float32)}, "confidences"),
        ({"entropies": np.full(144, -1.0, np.float32)}, "entropies"),
        ({"target_ids": np.array([{}] * 144)}, "pickle"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    path = archive(tmp_path / "t.npz", **changed)
    with pytest.raises(TraceError, match=named):
        read(path)


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(TraceError, match="not a trace"):
        read(path)
    with pytest.raises(OSError, match="absent"):
        read(tmp_path / "absent.npz")


def test_a_trace_with_a_wrong_shape_cannot_be_made() -> None:
    good = prompt_trace([True, False])
    with pytest.raises(TraceError, match="rollouts"):
        replace(good, rollouts=good.rollouts[:0])
    with pytest.raises(TraceError, match="no token"):
        prompt_trace([])


def test_every_prompt_of_a_trace_has_its_own_place() -> None:
    trace: Trace = toy_trace()
    places = {(p.dataset, p.split, p.index) for p in trace.prompts}
    assert len(places) == len(trace.prompts)
