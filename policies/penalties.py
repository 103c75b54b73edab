"""What changes a position's logits before temperature: penalties, bias, and ids ruled out.

Repetition penalty (Keskar et al. 2019, §4.1, over prompt and generated ids) → presence and
frequency penalty (the OpenAI API's, over generated ids) → bias → no stop id before `min_tokens`.
All depend on the ids before the position only, drafts taken as committed, so a verified position
has the logits that the target alone would have had there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.types import SamplingParams

Logits = npt.NDArray[np.float32]


def adjusted(row: Logits, sampling: SamplingParams, held: Sequence[int], position: int) -> Logits:
    """The logits [vocab] at `position`, where the first `position` ids of `held` come before.

    The row itself if nothing applies, else a copy.
    """
    penalised = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    repetition = sampling.repetition_penalty != 1.0
    too_early = position < sampling.prompt_len + sampling.min_tokens
    if not (penalised or repetition or sampling.logit_bias or too_early):
        return row
    row = row.copy()
    if repetition:
        seen = np.unique(_known(held[:position], row.size))
        values = row[seen]
        by = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(values > 0.0, values / by, values * by)
    if penalised:
        generated = _known(held[sampling.prompt_len : position], row.size)
        seen, counts = np.unique(generated, return_counts=True)
        row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token_id, bias in sampling.logit_bias:
        if token_id < row.size:
            row[token_id] += bias
    if too_early:
        row[[i for i in sampling.stop_ids if i < row.size]] = -np.inf
    return row


def _known(ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """Without draft ids that have no logit here."""
    array = np.asarray(ids, np.int64)
    return array[array < vocab_size]
