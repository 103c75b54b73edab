"""Both verification rules for the draft tokens of one NAV, as numpy references.

`accept_exact` is the default, for coupled sampling (DESIGN §5): drafter and target choose by the
Gumbel-max trick with the same noise, so a draft token stands iff the target would have written it.
`accept_by_rejection` is the papers' rule (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023,
Algorithm 2), exact in distribution only.

This module knows no logits, filters, positions or generators: ids, distributions and draws come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Probs = npt.NDArray[np.floating[Any]]
Floats = npt.NDArray[np.float64]

# Below the smallest normal number a residual is rounding, and its product with a draw imprecise.
_LEAST_RESIDUAL = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafts stand, and the target's token after them: recovered, bonus, or none.

    `inconsistent`: the draft distribution at the first rejection cannot have produced its draft
    (stale or corrupt); the recovered token was then drawn from the target's, and the output is
    still exact, but somebody has to be told.
    """

    accepted: int
    next_id: int | None
    recovered: bool
    inconsistent: bool = False


def accept_exact(draft_ids: Sequence[int], target_ids: Sequence[int]) -> Acceptance:
    """The drafts before the first that differs from the target's token at its position.

    `target_ids` holds one token more than `draft_ids`, the bonus token. With coupled choices the
    chance of agreement is at least (1 - d) / (1 + d), d the total variation distance of the two
    distributions; rejection sampling reaches 1 - d, but its output depends on the drafts.
    """
    if len(target_ids) != len(draft_ids) + 1:
        raise ValueError(f"{len(draft_ids)} drafts need one target id more, got {len(target_ids)}")
    for accepted, (draft_id, target_id) in enumerate(zip(draft_ids, target_ids, strict=False)):
        if draft_id != target_id:
            return Acceptance(accepted, int(target_id), recovered=True)
    return Acceptance(len(draft_ids), int(target_ids[-1]), recovered=False)


def accept_by_rejection(
    draft_ids: Sequence[int],
    draft_probs: Probs,
    target_probs: Probs,
    accept_uniforms: Sequence[float],
    next_uniforms: Sequence[float],
) -> Acceptance:
    """Keeps each draft with probability min(1, target / draft); recovers from the residual.

    The residual is max(0, target - draft), normalised [p'(x), Leviathan et al. 2023, §2.3].
    `draft_probs` is [drafts, vocab], exactly what the drafts were drawn from. `target_probs` is
    [drafts + 1, vocab], or [drafts, vocab] where no bonus token is wanted. All draws lie in [0, 1)
    and are independent: one of `accept_uniforms` per draft, and one of `next_uniforms` per row of
    `target_probs`, of which the row where the next token falls uses its own.
    """
    _check(draft_ids, draft_probs, target_probs, accept_uniforms, next_uniforms)
    for accepted, draft_id in enumerate(draft_ids):
        target = target_probs[accepted].astype(np.float64)
        draft = draft_probs[accepted].astype(np.float64)
        consistent = _could_draw(draft, draft_id)
        if consistent and _stands(draft[draft_id], target[draft_id], accept_uniforms[accepted]):
            continue
        source = residual(target, draft) if consistent else target
        next_id = draw(source, next_uniforms[accepted])
        return Acceptance(accepted, next_id, recovered=True, inconsistent=not consistent)
    if len(target_probs) == len(draft_ids):
        return Acceptance(len(draft_ids), None, recovered=False)
    bonus_id = draw(target_probs[-1].astype(np.float64), next_uniforms[-1])
    return Acceptance(len(draft_ids), bonus_id, recovered=False)


def draw(weights: Floats, uniform: float) -> int:
    """The id at `uniform` of the cumulative weights [vocab]; never one whose weight is zero."""
    cumulative = np.cumsum(weights)
    token_id = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if token_id < weights.size:
        return token_id
    return int(np.flatnonzero(weights)[-1])  # the product was rounded up to the total


def residual(target: Floats, draft: Floats) -> Floats:
    """Weights max(0, target - draft), or the target's own where these vanish or are not numbers."""
    positive: Floats = np.maximum(target - draft, 0.0)
    return positive if positive.sum() >= _LEAST_RESIDUAL else target


def _stands(draft_prob: float, target_prob: float, uniform: float) -> bool:
    """The accept test, strict: a target probability of 0 fails even at uniform 0."""
    # the first half is implied, except where the product of a denormal rounds back up
    return bool(target_prob >= draft_prob or uniform * draft_prob < target_prob)


def _could_draw(draft: Floats, draft_id: int) -> bool:
    return bool(np.isfinite(draft).all() and draft.min() >= 0.0 and draft[draft_id] > 0.0)


def _check(
    draft_ids: Sequence[int],
    draft_probs: Probs,
    target_probs: Probs,
    accept_uniforms: Sequence[float],
    next_uniforms: Sequence[float],
) -> None:
    count = len(draft_ids)
    if target_probs.ndim != 2 or len(target_probs) not in (count, count + 1):
        raise ValueError(f"target_probs of {count} drafts have the shape {target_probs.shape}")
    vocab = target_probs.shape[1]
    if draft_probs.shape != (count, vocab):
        raise ValueError(f"draft_probs must be {(count, vocab)}, got {draft_probs.shape}")
    if not all(0 <= draft_id < vocab for draft_id in draft_ids):
        raise ValueError(f"draft ids must lie in [0, {vocab}), got {tuple(draft_ids)}")
    if len(accept_uniforms) != count or len(next_uniforms) != len(target_probs):
        raise ValueError("one accept draw per draft and one next draw per target row are needed")
    if not all(0.0 <= uniform < 1.0 for uniform in (*accept_uniforms, *next_uniforms)):
        raise ValueError("draws must lie in [0, 1)")
    finite = np.isfinite(target_probs).all() and (target_probs >= 0.0).all()
    if not finite or not (target_probs > 0.0).any(axis=1).all():
        raise ValueError("every row of target_probs must be finite, >= 0 and not all zero")
