"""What a model writes at a position, as a function of logits, parameters, seed and position.

Coupled sampling (the Gumbel-max trick) makes the choice an argmax over noisy logits. The noise is a
hash of (seed, position, id), so the drafter, which knows no target logits, still draws with the
same noise and mostly picks the same id. `pick` is the whole rule: penalties and bias
(policies/penalties.py) → temperature → top-k → top-p → noise.

This module does not know which model the logits come from, and keeps no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.penalties import Logits, adjusted
from policies.types import Pick, SamplingParams, TokenLogprobs

Floats = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]

# -log(-log(u)) at the largest and the smallest uniform, 1 - 2^-33 and 2^-33: 22.874 and -3.131.
GUMBEL_MAX = 22.9
GUMBEL_MIN = -3.2

# Below this temperature the noise spans less than 3e-4 logits, under what two kernels differ by.
GREEDY_BELOW = 1e-5

LEAST_LOGPROB = -9999.0  # stands for the log of 0, which JSON cannot write

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
_LOWEST = np.finfo(np.float32).min
_USUAL_DEPTH = 24.0  # temperatures below the peak; what lies deeper seldom moves a filter's cut
_CHUNK = 8192  # ids per round of noise: 64 KiB of bits stay in the cache
_ROWS_PER_UNIT = 64  # of depth, in the histogram that finds the nucleus
_LAST_ROW = 2047


class NonFiniteLogits(ValueError):
    """The logits hold NaN or +inf, or mask every id: no choice from them means anything."""


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the choice is the highest logit, the lowest id among equals; no noise, no filters."""
    return sampling.temperature < GREEDY_BELOW


def pick(
    logits: npt.ArrayLike, sampling: SamplingParams, held: Sequence[int], position: int
) -> Pick:
    """A model's choice at `position`, from its logits there and the ids before it.

    Of `held` only the first `position` ids count. Raises NonFiniteLogits.
    """
    row, _ = _checked(logits)
    token_id = choose(adjusted(row, sampling, held, position), sampling, position)
    confidence, entropy = signal(row, token_id)
    if sampling.logprobs is None:
        return Pick(token_id, confidence, entropy)
    logprobs = token_logprobs(row, token_id, sampling.logprobs)
    return Pick(token_id, confidence, entropy, logprobs)


def choose(logits: npt.ArrayLike, sampling: SamplingParams, position: int) -> int:
    """The target's id at an absolute position: argmax over kept ids of logit + T · Gumbel noise.

    The lowest id among equal scores. Raises NonFiniteLogits for NaN, +inf or only -inf.
    The peak passes every filter, so an id that cannot beat it is left out before the filters.
    """
    row, top = _checked(logits)
    if is_greedy(sampling):
        return top
    key = _noise_key(sampling.seed, position)
    lead = float(_gumbel_of(_noise_bits(key, np.array([top])))[0])
    depth = GUMBEL_MAX - lead
    near = _within(row, top, depth * sampling.temperature)
    ids = _filtered(row, near, top, sampling, depth)
    if ids is None:
        ids = _filtered(row, _within(row, top, math.inf), top, sampling, math.inf)
    assert ids is not None
    return _winner(row, ids, top, lead, sampling.temperature, key)


def kept_ids(logits: npt.ArrayLike, sampling: SamplingParams) -> IdArray:
    """The ids that can be chosen, ascending: temperature → top-k → top-p; never a masked id.

    Ties go to the lower id. Top-p keeps the fewest ids whose mass, out of the top-k survivors'
    mass, reaches top_p, and at least one.
    """
    row, top = _checked(logits)
    if is_greedy(sampling):
        return np.array([top], np.int64)
    near = _within(row, top, _USUAL_DEPTH * sampling.temperature)
    ids = _filtered(row, near, top, sampling, _USUAL_DEPTH)
    if ids is None or ids.size == near.size:  # more may be kept further down
        ids = _filtered(row, _within(row, top, math.inf), top, sampling, math.inf)
    assert ids is not None
    return ids


def filtered_probs(logits: npt.ArrayLike, sampling: SamplingParams) -> Floats:
    """The distribution that `choose` draws from, [vocab]; one-hot when greedy."""
    row, top = _checked(logits)
    ids = kept_ids(row, sampling)
    probs = np.zeros(row.size)
    if is_greedy(sampling):
        probs[ids] = 1.0
        return probs
    weights = np.exp(-_depths(row[ids], float(row[top]), sampling.temperature))
    probs[ids] = weights / weights.sum()
    return probs


def signal(logits: npt.ArrayLike, token_id: int) -> tuple[float, float]:
    """The model's probability of an id, and the entropy of its distribution in nats.

    Of the softmax at temperature 1, unfiltered; in [0, 1], and at least 0.
    """
    row, top = _checked(logits)
    depths = np.maximum(row - row[top], np.float32(-1e3))  # a masked id weighs nothing
    weights = np.exp(depths)
    total = float(weights.sum())
    entropy = math.log(total) - float(weights @ depths) / total
    return float(weights[token_id]) / total, max(0.0, entropy)


def token_logprobs(logits: npt.ArrayLike, token_id: int, count: int) -> TokenLogprobs:
    """log softmax of the logits at an id and at the `count` likeliest, the lowest id among equals.

    Nothing below LEAST_LOGPROB.
    """
    row, top = _checked(logits)
    peak = float(row[top])
    log_total = peak + math.log(float(np.exp(row.astype(np.float64) - peak).sum()))
    best = _highest(row, count) if count else np.empty(0, np.int64)
    best = best[np.argsort(-row[best], kind="stable")]

    def logprob(index: int) -> float:
        return max(float(row[index]) - log_total, LEAST_LOGPROB)

    return TokenLogprobs(logprob(token_id), tuple((int(i), logprob(int(i))) for i in best))


def gumbel(seed: int, position: int, ids: npt.NDArray[Any]) -> Floats:
    """Standard Gumbel noise of each id, between GUMBEL_MIN and GUMBEL_MAX: -log(-log(u)).

    u = (k + 0.5) / 2^32, where k is the hash of (seed, position, id). Vocabulary size, padding and
    truncation play no part in it.
    """
    return _gumbel_of(_noise_bits(_noise_key(seed, position), ids))


def _noise_key(seed: int, position: int) -> int:
    """Output number `position` of the SplitMix64 stream that starts at the mixed seed."""
    return _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)


def _noise_bits(key: int, ids: npt.NDArray[Any]) -> Bits:
    """The upper 32 bits of outputs number `ids` of the SplitMix64 stream that starts at `key`."""
    state = ids.astype(np.uint64)
    state *= np.uint64(_GOLDEN)
    state += np.uint64((key + _GOLDEN) & _MASK)
    state ^= state >> np.uint64(30)
    state *= np.uint64(_MIX_1)
    state ^= state >> np.uint64(27)
    state *= np.uint64(_MIX_2)
    state ^= state >> np.uint64(31)
    state >>= np.uint64(32)
    return state


def _mix(word: int) -> int:
    """SplitMix64's finaliser (Steele et al. 2014), a bijection of 64 bits."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


def _gumbel_of(bits: Bits) -> Floats:
    noise: Floats = -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2.0**32))
    return noise


def _least_bits(noise: float) -> int:
    """Every hash below this one gives less than `noise`; a few just above it may as well."""
    if noise <= GUMBEL_MIN:
        return 0
    return max(0, math.floor(2.0**32 * math.exp(-math.exp(-noise))) - 3)


def _checked(logits: npt.ArrayLike) -> tuple[Logits, int]:
    """The logits as float32 and the lowest id of the highest; argmax stops at the first NaN."""
    row = np.asarray(logits, np.float32)
    if row.ndim != 1 or row.size == 0:
        raise ValueError(f"logits must be one row of the vocabulary, got shape {row.shape}")
    top = int(row.argmax())
    if not math.isfinite(row[top]):
        raise NonFiniteLogits(f"the highest of {row.size} logits is {row[top]}, at id {top}")
    return row, top


def _within(row: Logits, top: int, depth: float) -> IdArray:
    """Unmasked ids, ascending, of all logits that lie at most `depth` below the peak."""
    floor = np.float32(max(float(row[top]) - depth, float(_LOWEST)))
    if floor > _LOWEST:  # rounding may have raised it; the next float down loses no id
        floor = np.nextafter(floor, _LOWEST)
    return np.flatnonzero(row >= floor)


def _depths(values: npt.NDArray[Any], peak: float, temperature: float) -> Floats:
    depths: Floats = (peak - values.astype(np.float64)) / temperature
    return depths


def _filtered(
    row: Logits, near: IdArray, top: int, sampling: SamplingParams, depth: float
) -> IdArray | None:
    """Those of `near` that survive the filters over the whole vocabulary.

    `near` holds every id down to `depth` temperatures below the peak. None: the ids further down
    have to be weighed too.
    """
    beyond = row.size - near.size
    if sampling.top_k:
        beyond = min(beyond, max(0, sampling.top_k - near.size))
        near = near[_highest(row[near], sampling.top_k)]
    if sampling.top_p == 1.0:
        return near
    values = row[near]
    depths = _depths(values, float(row[top]), sampling.temperature)
    kept = _nucleus(values, depths, sampling.top_p, beyond * math.exp(-depth))
    return None if kept is None else near[kept]


def _highest(values: Logits, count: int) -> IdArray:
    """Indices, ascending, of the `count` highest values; the earlier among equals."""
    if count >= values.size:
        return np.arange(values.size)
    least = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - above.size]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(values: Logits, depths: Floats, top_p: float, mass_beyond: float) -> IdArray | None:
    """Indices, ascending, of the fewest highest values whose mass reaches `top_p` of the total.

    A histogram over depth finds the row in which the mass is reached, so only that row is sorted.
    `mass_beyond` bounds the mass of the values not given; None if it could move the cut.
    """
    weights = np.exp(-depths)
    total = float(weights.sum())
    rows = np.minimum(depths * _ROWS_PER_UNIT, _LAST_ROW).astype(np.intp)
    mass = np.cumsum(np.bincount(rows, weights))
    row = min(int(np.searchsorted(mass, top_p * total)), mass.size - 1)
    edge = np.flatnonzero(rows == row)
    edge = edge[np.argsort(-values[edge], kind="stable")]
    reached = np.cumsum(weights[edge]) + (mass[row - 1] if row else 0.0)
    count = min(int(np.searchsorted(reached, top_p * total)) + 1, edge.size)
    # the margin covers the rounding of sums over other sets of ids
    if mass_beyond and reached[count - 1] < top_p * (total + mass_beyond) * (1 + 1e-12):
        return None
    return np.sort(np.concatenate((np.flatnonzero(rows < row), edge[:count])))


def _winner(row: Logits, ids: IdArray, top: int, lead: float, temperature: float, key: int) -> int:
    """argmax over `ids` of logit + T · noise, the lowest id among equals; `lead` is top's noise.

    An id must have more noise than the best score so far is above the peak, which its hash tells
    before any logarithm is taken.
    """
    temperature = min(temperature, 1e300)  # times the noise must not overflow
    peak = float(row[top])
    best, best_id = peak + temperature * lead, top
    for start in range(0, ids.size, _CHUNK):
        part = ids[start : start + _CHUNK]
        bits = _noise_bits(key, part)
        # rounding is monotone: no better score has less noise than this; equal scores have as much
        able = np.flatnonzero(bits >= _least_bits((best - peak) / temperature))
        if able.size == 0:
            continue
        part = part[able]
        scores = row[part].astype(np.float64) + temperature * _gumbel_of(bits[able])
        first = int(scores.argmax())
        score, token_id = float(scores[first]), int(part[first])
        if (score, -token_id) > (best, -best_id):
            best, best_id = score, token_id
    return best_id
