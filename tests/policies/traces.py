"""Small traces for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.traces import ROLLOUT_LEN, ModelFile, PromptTrace, Split, Trace

END = 99


def prompt_trace(
    agrees: Sequence[bool],
    *,
    dataset: str = "toy",
    split: Split = "evaluate",
    index: int = 0,
    seed: int = 0,
) -> PromptTrace:
    """An answer of as many tokens; the draft is sure of 0.9 where it agrees, else of 0.4."""
    rng = np.random.default_rng(seed)
    own = rng.integers(1, 50, len(agrees)).astype(np.int32)
    wrong = np.where(agrees, own, own + 40).astype(np.int32)
    missed = len(agrees) - sum(agrees)
    rollouts = rng.random((missed, ROLLOUT_LEN, 2)).astype(np.float32)
    return PromptTrace(
        dataset,
        split,
        index,
        prompt_len=3,
        target_ids=own,
        draft_ids=np.stack([wrong, wrong + 1, wrong + 2], axis=1),
        confidences=np.where(agrees, 0.9, 0.4).astype(np.float32),
        entropies=np.where(agrees, 0.2, 1.5).astype(np.float32),
        rollouts=rollouts,
    )


def toy_trace(
    *, prompts: int = 3, length: int = 24, acceptance: float = 0.8, seed: int = 0
) -> Trace:
    """Both splits of one data set."""
    rng = np.random.default_rng(seed)
    splits: tuple[Split, Split] = ("tune", "evaluate")
    return Trace(
        ModelFile("small", "a" * 64),
        ModelFile("large", "b" * 64),
        length,
        frozenset({END}),
        tuple(
            prompt_trace(
                (rng.random(length) < acceptance).tolist(), split=split, index=index, seed=index
            )
            for split in splits
            for index in range(prompts)
        ),
    )
