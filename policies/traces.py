"""Recorded traces of a pair of models: what each wrote, and how sure the draft model was.

A trace holds what a replay needs and no text: for every position of a prompt's answer the target's
own token, and the draft model's three likeliest tokens after the target's prefix, the probability
of the first and the entropy of all. Where that first one is not the target's token, a roll-out says
how sure the draft model was of the next ROLLOUT_LEN tokens that it drafted on its wrong path.

The file is an .npz archive of arrays over all prompts end to end, and a header in JSON. Arrays are
read without pickle.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Split = Literal["tune", "evaluate"]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

VERSION = 1
ROLLOUT_LEN = 20
TOP = 3
MAX_FILE_BYTES = 256 << 20  # of one array: a larger one is no trace but an attack on the memory


class TraceError(ValueError):
    """A file that is no trace, or one of another version; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model by name and the sha256 of its file."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class PromptTrace:
    """The answer to one prompt, of n tokens, and what the draft model made of it.

    `index` is the prompt's in its split of the data set. `rollouts[m, j]` is the (confidence,
    entropy) of the j-th draft after the m-th mismatch, in the order of the mismatches. Confidences
    are softmax probabilities at temperature 1, entropies are in nats.
    """

    dataset: str
    split: Split
    index: int
    prompt_len: int
    target_ids: Ints  # [n]
    draft_ids: Ints  # [n, TOP], the likeliest first
    confidences: Floats  # [n], of the first
    entropies: Floats  # [n]
    rollouts: Floats  # [mismatches, ROLLOUT_LEN, 2]

    def __post_init__(self) -> None:
        length = self.target_ids.size
        shapes = {
            "target_ids": (length,),
            "draft_ids": (length, TOP),
            "confidences": (length,),
            "entropies": (length,),
            "rollouts": (int(self.mismatches.size), ROLLOUT_LEN, 2),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise TraceError(f"{name} must be {shape}, got {getattr(self, name).shape}")
        if not length:
            raise TraceError(f"{self.dataset} {self.split} {self.index} has no token")
        sure = (self.confidences, self.rollouts[..., 0])
        if not all(np.all((values >= 0.0) & (values <= 1.0)) for values in sure):
            raise TraceError("confidences must be in [0, 1]")
        if not all(np.all(values >= 0.0) for values in (self.entropies, self.rollouts[..., 1])):
            raise TraceError("entropies must be >= 0")

    @property
    def mismatches(self) -> npt.NDArray[np.intp]:
        """The positions in the answer where the draft's first choice is not the target's token."""
        return np.flatnonzero(self.draft_ids[:, 0] != self.target_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Answers of one pair, greedy, of at most `max_tokens` each; `end_ids` end a text."""

    draft: ModelFile
    target: ModelFile
    max_tokens: int
    end_ids: frozenset[int]
    prompts: tuple[PromptTrace, ...]

    def of(self, dataset: str, split: Split) -> tuple[PromptTrace, ...]:
        """The prompts of a split of a data set."""
        return tuple(
            prompt for prompt in self.prompts if prompt.dataset == dataset and prompt.split == split
        )

    @property
    def datasets(self) -> tuple[str, ...]:
        """The data sets' names, in the order of the prompts."""
        return tuple(dict.fromkeys(prompt.dataset for prompt in self.prompts))


_ARRAYS = ("target_ids", "draft_ids", "confidences", "entropies", "rollouts")
_TYPES = {"target_ids": np.int32, "draft_ids": np.int32}


def write(trace: Trace, path: Path) -> None:
    """Write the trace, whole or not at all; the same trace gives the same bytes."""
    header = {
        "version": VERSION,
        "draft": [trace.draft.name, trace.draft.sha256],
        "target": [trace.target.name, trace.target.sha256],
        "max_tokens": trace.max_tokens,
        "end_ids": sorted(trace.end_ids),
        "prompts": [
            [p.dataset, p.split, p.index, p.prompt_len, p.target_ids.size] for p in trace.prompts
        ],
    }
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(prompt, name) for prompt in trace.prompts])
        for name in _ARRAYS
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        np.savez_compressed(file, **arrays)
    new.replace(path)


def read(path: Path) -> Trace:
    """The trace in a file. Raises TraceError if it is none of this version, OSError if missing."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.file_size > MAX_FILE_BYTES for member in archive.infolist()):
                raise TraceError(f"an array is over {MAX_FILE_BYTES} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(bytes(arrays["header"]))
            if not isinstance(header, dict) or header.get("version") != VERSION:
                raise TraceError(f"version must be {VERSION}, got {header!r:.80}")
            return _trace(header, {name: arrays[name] for name in _ARRAYS})
    except (KeyError, IndexError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path} is not a trace of version {VERSION}: {error}") from error


def _trace(header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Trace:
    for name, values in arrays.items():
        wanted = _TYPES.get(name, np.float32)
        if values.dtype != wanted:
            raise TraceError(f"{name} must be {np.dtype(wanted)}, got {values.dtype}")
    prompts = []
    at = rollout_at = 0
    for dataset, split, index, prompt_len, length in header["prompts"]:
        if split not in ("tune", "evaluate") or min(index, prompt_len - 1, length - 1) < 0:
            raise TraceError(f"no prompt is {split!r} {index} of {prompt_len} and {length} tokens")
        positions = slice(at, at + length)
        target_ids, draft_ids = arrays["target_ids"][positions], arrays["draft_ids"][positions]
        missed = int(np.count_nonzero(draft_ids[:, 0] != target_ids))
        prompts.append(
            PromptTrace(
                str(dataset),
                split,
                int(index),
                int(prompt_len),
                target_ids,
                draft_ids,
                arrays["confidences"][positions],
                arrays["entropies"][positions],
                arrays["rollouts"][rollout_at : rollout_at + missed],
            )
        )
        at, rollout_at = at + length, rollout_at + missed
    if (at, rollout_at) != (arrays["target_ids"].size, len(arrays["rollouts"])):
        raise TraceError(f"arrays must hold {at} positions and {rollout_at} roll-outs")
    return Trace(
        ModelFile(*map(str, header["draft"])),
        ModelFile(*map(str, header["target"])),
        int(header["max_tokens"]),
        frozenset(int(i) for i in header["end_ids"]),
        tuple(prompts),
    )
