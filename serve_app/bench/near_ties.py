"""The near-tie rule: emitted tokens against a fixed-shape, teacher-forced forward of the target.

Forwards of different shapes differ in the last bits, so a token may differ from the fixed-shape
choice without a fault. It is a near tie if a change of the logits below `EPSILON` could have made
the difference; anything else is a mismatch. Every position is judged by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deployments.engines.llama_context import LlamaContext, Row
from policies.penalties import adjusted
from policies.sampling import choose, gumbel, is_greedy, kept_ids
from policies.types import SamplingParams
from serve_app.bench.comparison import EPSILON, Comparison

BLOCK = 16  # tokens of the fixed-shape forward

Logits = npt.NDArray[np.float32]
# (ids, start) → the logits after ids[start], ids[start + 1], …; [len(ids) - start, vocab]
TeacherForced = Callable[[Sequence[int], int], Logits]


def compare(
    target: TeacherForced, prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams
) -> Comparison:
    """Judge every generated token given the ids that were really emitted before it."""
    first = len(prompt) - 1
    ids = [*prompt, *generated]
    logits = target(ids, first)
    sampling = replace(sampling, prompt_len=len(prompt))
    identical = near = 0
    for position, emitted in enumerate(generated, len(prompt)):
        row = adjusted(logits[position - 1 - first], sampling, ids, position)
        expected = choose(row, sampling, position)
        if emitted == expected:
            identical += 1
        elif margin(row, sampling, position, emitted, expected) < EPSILON:
            near += 1
    return Comparison(identical, near, len(generated) - identical - near)


def margin(
    row: Logits, sampling: SamplingParams, position: int, emitted: int, expected: int
) -> float:
    """By how many logits the row must change for `emitted` to win over `expected`.

    The gap of perturbed scores; where a filter parts the two, at least the distance to its cut.
    """
    ids = np.array([emitted, expected])
    noise = gumbel(sampling.seed, position, ids) * sampling.temperature
    score = row[ids].astype(np.float64) + noise
    gap = max(0.0, float(score[1] - score[0]))
    kept = kept_ids(row, sampling)
    if is_greedy(sampling):
        return gap
    if emitted not in kept:
        return max(gap, float(row[kept].min() - row[emitted]))
    # or the expected id leaves the kept set, and the emitted one is the best of the others
    left_out = np.setdiff1d(np.flatnonzero(np.isfinite(row)), kept)
    if not left_out.size:
        return gap
    to_leave = float(row[expected] - row[left_out].max())
    others = kept[kept != expected]
    scores = row[others] + gumbel(sampling.seed, position, others) * sampling.temperature
    return min(gap, max(to_leave, float(scores.max() - score[0])))


def teacher_forced(path: Path, context: int, threads: int) -> TeacherForced:
    """A model's logits by llama.cpp, always in forwards of `BLOCK` tokens from position 0 on."""
    model = LlamaContext(path, context=context, slots=1, threads=threads, batch_tokens=BLOCK)

    def logits(ids: Sequence[int], start: int) -> Logits:
        model.remove(0, 0)
        # the last block is filled up, so that its shape is that of the others
        padded = [*ids, *[ids[-1]] * (-len(ids) % BLOCK)]
        rows: list[Logits] = []
        for at in range(0, len(padded), BLOCK):
            block = [Row(padded[i], i, 0, wants_logits=True) for i in range(at, at + BLOCK)]
            model.forward(block)
            for position in range(max(at, start), min(at + BLOCK, len(ids))):
                rows.append(model.logits(position - at).copy())
        return np.stack(rows)

    return logits
