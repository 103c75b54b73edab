"""The judge of losslessness: what counts as a near tie, in logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from policies.sampling import choose, kept_ids
from policies.types import SamplingParams
from serve_app.bench.comparison import Comparison
from serve_app.bench.near_ties import compare, margin

GREEDY = SamplingParams()


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


@pytest.mark.parametrize("gap", [0.0, 0.5, 3.0])
def test_the_greedy_margin_is_the_gap_of_the_logits(gap: float) -> None:
    assert margin(row(5.0, 5.0 - gap, 0.0), GREEDY, 7, emitted=1, expected=0) == pytest.approx(gap)


def test_an_id_cut_by_a_filter_is_as_far_away_as_the_cut() -> None:
    logits = row(5.0, 4.9, 2.0, 1.0)
    sampling = SamplingParams(1.0, top_k=2, seed=3)
    expected = choose(logits, sampling, 4)
    assert margin(logits, sampling, 4, emitted=3, expected=expected) >= 3.9


@pytest.mark.parametrize("distance", [0.1, 2.0])
def test_an_expected_id_at_the_cut_is_as_near_as_the_cut(distance: float) -> None:
    """Had the last kept id fallen behind the first one left out, another would have been chosen."""
    logits = row(6.0, 5.0, 5.0 - distance, 1.0)
    for seed in range(1_000):
        sampling = SamplingParams(2.0, top_k=2, seed=seed)
        if choose(logits, sampling, 4) == 1:
            assert list(kept_ids(logits, sampling)) == [0, 1]
            assert margin(logits, sampling, 4, emitted=0, expected=1) <= distance + 1e-6
            return
    raise AssertionError("no seed chose the id at the cut")


def test_every_token_is_judged_by_itself() -> None:
    table = {0: row(0, 9, 0, 0), 1: row(0, 0, 9, 8.5), 3: row(9, 0, 0, 0)}

    def target(ids: Sequence[int], start: int) -> np.ndarray:
        return np.stack([table.get(i, row(0, 0, 0, 9)) for i in ids[start:]])

    # 1 is the target's; 3 instead of 2 is a near tie; after 3 comes 0, and 2 is none of it
    expected = Comparison(identical=1, near_ties=1, mismatches=1)
    assert compare(target, [0], [1, 3, 2], GREEDY) == expected
