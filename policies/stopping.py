"""How many tokens to draft before a verification: the closed forms of UCB-SpecStop.

A round drafts k tokens, sends them, and waits for one NAV. Two curves over k = 1 … max_draft_len
describe it, whatever model or measurement they come from:

- `prefix`, the probability that the first k drafts are all accepted (q̂ in the paper, or α^k);
- `round_ms`, what a round of k drafts takes without the network's delay.

The cost of a committed token is then C(k, d) = (round_ms[k] + 2d) / B(k), a ratio of expectations,
where B(k) = 1 + Σ_{j≤k} prefix[j] and d, `one_way_ms`, is half a round trip. Index i of a curve
belongs to k = i + 1. A delay that varies enters by its mean only, if k is chosen before it is seen
[Theorem 3]: pass the mean. What seeing it first is worth is the subject of `markov`.

This module knows one NAV at a time, no drafting while waiting, and no confidences. Every function
raises ValueError naming the argument that is not finite, or out of range; none returns NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.costs import Costs

Floats = npt.NDArray[np.float64]

# Bounds on times beyond which a product or a quotient of two could overflow.
MIN_MS, MAX_MS = 1e-12, 1e12


def geometric_prefix(acceptance_rate: float, max_draft_len: int) -> Floats:
    """α^k: every draft is accepted with the same probability [Assumption 1]."""
    if not 0.0 <= acceptance_rate <= 1.0:
        raise ValueError(f"acceptance_rate must be in [0, 1], got {acceptance_rate}")
    return np.power(float(acceptance_rate), _draft_lens(max_draft_len))


def heavy_tailed_prefix(tail_exponent: float, max_draft_len: int) -> Floats:
    """(1 + k)^-β, under which k* outgrows every logarithm of the delay [§IV-E].

    It grows as the delay to the power 1/β for β > 1, and in proportion to the delay for β < 1.
    """
    if not (math.isfinite(tail_exponent) and tail_exponent > 0.0):
        raise ValueError(f"tail_exponent must be a finite number > 0, got {tail_exponent}")
    return np.power(1.0 + _draft_lens(max_draft_len), -float(tail_exponent))


def empirical_prefix(accepted_at: Sequence[float], judged_at: Sequence[float]) -> Floats:
    """The prefix curve behind counts by position in the NAV, as `SessionMetrics` keeps them.

    They may be weighted, as `AcceptanceCounts` are.

    A draft is judged only if all before it stood, so the curve is the running product of
    accepted / judged (Kaplan and Meier's estimator): rounds of different lengths add up, as long as
    a round's length was not chosen by looking at its drafts. It ends where nothing was judged.
    """
    if len(accepted_at) != len(judged_at):
        raise ValueError(
            f"accepted_at must be as long as judged_at, {len(judged_at)}, got {len(accepted_at)}"
        )
    for stood, judged in zip(accepted_at, judged_at, strict=True):
        if not 0 <= stood <= judged < math.inf:
            raise ValueError(f"accepted_at must be in [0, judged_at], got {stood} of {judged}")
    known = next((i for i, judged in enumerate(judged_at) if not judged), len(judged_at))
    if not known:
        raise ValueError("judged_at must start with a positive count, got no judged draft")
    accepted = np.asarray(accepted_at[:known], dtype=np.float64)
    return np.asarray(np.cumprod(accepted / np.asarray(judged_at[:known])))


def expected_committed(prefix: Floats) -> Floats:
    """B(k) for every k: one token of the target's own, and each draft if all before it stand.

    With a constant acceptance rate α this is (1 - α^(k+1)) / (1 - α).
    """
    prefix = _curve("prefix", prefix)
    # written so that NaN fails
    if not (prefix[0] <= 1.0 and prefix[-1] >= 0.0 and bool((prefix[1:] <= prefix[:-1]).all())):
        raise ValueError(f"prefix must fall within [0, 1] and never rise, got {prefix.tolist()}")
    return 1.0 + np.cumsum(prefix)


def modelled_round_ms(costs: Costs, max_draft_len: int) -> Floats:
    """k·draft_ms + a forward over the k drafts and the token before them.

    `verify_ms` = 0 is the paper's model, k·c_d + (k+1)·c_v [§III-A]; `verify_ms_per_token` = 0 a
    verifier whose forward takes the same time for all k, which is what Table I shows.
    """
    drafts = _draft_lens(max_draft_len)
    draft_ms, verify_ms, per_token_ms = _checked_costs(costs)
    return drafts * draft_ms + verify_ms + (drafts + 1.0) * per_token_ms


def calibrated_round_ms(
    draft_ms_per_token: Sequence[float], verify_ms_per_token: Sequence[float]
) -> Floats:
    """k·c_d(k) + (k+1)·c_v(k) from per-token times measured at each k [Table I]."""
    max_draft_len = len(draft_ms_per_token)
    draft_ms = _times("draft_ms_per_token", draft_ms_per_token, max_draft_len)
    verify_ms = _times("verify_ms_per_token", verify_ms_per_token, max_draft_len)
    drafts = _draft_lens(max_draft_len)
    return drafts * draft_ms + (drafts + 1.0) * verify_ms


def cost_ms_per_token(round_ms: Floats, prefix: Floats, one_way_ms: float) -> Floats:
    """C(k, d) for every k: milliseconds per committed token [§III-C]."""
    committed = expected_committed(prefix)
    delayed_ms = _times("round_ms", round_ms, committed.size) + 2.0 * _checked_delay(one_way_ms)
    return np.asarray(delayed_ms / committed)


def optimal_draft_len(round_ms: Floats, prefix: Floats, one_way_ms: float) -> int:
    """The shortest draft of the lowest cost, k^-(d) = min argmin C(k, d).

    It never falls as the delay grows, whatever the curves [Theorem 2]. From measured curves it is
    the baseline B6, the best fixed draft length.
    """
    return int(np.argmin(cost_ms_per_token(round_ms, prefix, one_way_ms))) + 1


def marginal_draft_len(round_ms: Floats, prefix: Floats, one_way_ms: float) -> int:
    """The first k whose next draft costs, per token it adds, at least C(k, d) [Eq. 14].

    It is `optimal_draft_len` wherever `round_ms` is convex, as every modelled one is [Lemma 1,
    Corollary 1]: `prefix` never rises, so the price of one more token never falls. Measured round
    times need not be convex, and then the rule can stop at a local minimum.
    """
    committed = expected_committed(prefix)
    delayed_ms = _times("round_ms", round_ms, committed.size) + 2.0 * _checked_delay(one_way_ms)
    # as products, because the next draft may add no token at all
    enough = np.diff(delayed_ms) * committed[:-1] >= delayed_ms[:-1] * np.asarray(prefix)[1:]
    return int(np.argmax(np.append(enough, True))) + 1


def critical_one_way_ms(round_ms: Floats, prefix: Floats) -> float:
    """d_c, the delay above which some longer draft beats k = 1, and up to which none does.

    0 if one does without any delay, inf if none ever does. Where `round_ms` is convex the first to
    do so is k = 2; else the optimum may jump (from 1 to 5 on the paper's LLaMA curves).
    """
    committed = expected_committed(prefix)
    round_ms = _times("round_ms", round_ms, committed.size)
    more_committed = np.cumsum(np.asarray(prefix, np.float64)[1:])
    excess = committed[0] * (round_ms[1:] - round_ms[0]) - round_ms[0] * more_committed
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        crossings_ms = np.maximum(0.0, excess / (2.0 * more_committed))
    # 0 / 0: as dear and as many tokens as k = 1
    return float(np.min(crossings_ms, initial=math.inf, where=~np.isnan(crossings_ms)))


def geometric_critical_one_way_ms(costs: Costs, acceptance_rate: float) -> float:
    """d_c in closed form for a constant acceptance rate α and modelled costs [Theorem 4, Eq. 24].

    With a = c_d + c_v and a fixed part f of the round (c_v in the paper) it is
    a(1 + α)/(2α²) - (a + f)/2, or 0 where that is negative.
    """
    per_draft_ms, fixed_ms = _linear_costs(costs, acceptance_rate)
    # two divisions, because the square of a tiny rate is zero
    gained_ms = per_draft_ms * (1.0 + acceptance_rate) / acceptance_rate / acceptance_rate
    return max(0.0, (gained_ms - per_draft_ms - fixed_ms) / 2.0)


def draft_len_envelope(costs: Costs, acceptance_rate: float, one_way_ms: float) -> tuple[int, int]:
    """Bounds on every optimal k, both log d / log(1/α) + O(1) [Theorems 1 and 4].

    With r = 1/α and y = 1 + (1 - α)(2d + f)/a, Eq. 14 says that k is the least one with
    r^(k+1) ≥ y + (1 - α)k. Hence r^(k+1) ≥ y from below. From above, k - 1 is not enough and
    (1 - α)(k - 1) ≤ ln r^k, so x = r^k has x - ln x ≤ y, which makes x ≤ 2(y - 1 + ln 2), and put
    into the logarithm, x ≤ y + ln(2(y - 1 + ln 2)). Doubling the delay therefore adds at most
    ln 2 / ln(1/α) tokens in the limit, 1.9 at α = 0.7 (the paper's 2.8 is for e times the delay).
    """
    per_draft_ms, fixed_ms = _linear_costs(costs, acceptance_rate)
    if per_draft_ms < MIN_MS:
        raise ValueError(
            f"draft_ms + verify_ms_per_token must be >= {MIN_MS:g}, got {per_draft_ms}"
        )
    delayed_ms = 2.0 * _checked_delay(one_way_ms) + fixed_ms
    y = 1.0 + (1.0 - acceptance_rate) * delayed_ms / per_draft_ms
    decay = -math.log(acceptance_rate)
    low = math.log(y) / decay - 1.0
    high = math.log(y + math.log(2.0 * (y - 1.0 + math.log(2.0)))) / decay
    # rounding may not exclude an optimum that lies on a bound
    return max(1, math.ceil(low - 1e-9)), max(1, math.floor(high + 1e-9))


def greedy_draft_len(round_ms: Floats, prefix: Floats) -> int:
    """B2, which knows costs and acceptance and takes the network for free."""
    return optimal_draft_len(round_ms, prefix, one_way_ms=0.0)


def theory_draft_len(
    costs: Costs, acceptance_rate: float, one_way_ms: float, max_draft_len: int
) -> int:
    """B4: costs averaged over k, and a constant acceptance rate."""
    return calibrated_draft_len(
        modelled_round_ms(costs, max_draft_len), acceptance_rate, one_way_ms
    )


def calibrated_draft_len(round_ms: Floats, acceptance_rate: float, one_way_ms: float) -> int:
    """B5: costs measured at each k, and a constant acceptance rate."""
    prefix = geometric_prefix(acceptance_rate, len(round_ms))
    return optimal_draft_len(round_ms, prefix, one_way_ms)


def _draft_lens(max_draft_len: int) -> Floats:
    if max_draft_len < 1:
        raise ValueError(f"max_draft_len must be >= 1, got {max_draft_len}")
    return np.arange(1.0, max_draft_len + 1)


def _curve(name: str, values: npt.ArrayLike) -> Floats:
    curve = np.asarray(values, dtype=np.float64)
    if curve.ndim != 1 or not curve.size:
        raise ValueError(f"{name} must be a list of max_draft_len numbers, got {curve.shape}")
    return curve


def checked_times(name: str, values: npt.ArrayLike, least_ms: float = 0.0) -> Floats:
    """Times of any shape as floats; ValueError unless all are in [least_ms, MAX_MS]."""
    times_ms = np.asarray(values, dtype=np.float64)
    # written so that NaN fails
    if not ((times_ms >= least_ms) & (times_ms <= MAX_MS)).all():
        raise ValueError(
            f"{name} must be in [{least_ms:g}, {MAX_MS:g}] ms, got {times_ms.tolist()}"
        )
    return times_ms


def _times(name: str, values: npt.ArrayLike, max_draft_len: int) -> Floats:
    times_ms = _curve(name, values)
    if times_ms.size != max_draft_len:
        raise ValueError(f"{name} must have {max_draft_len} values, got {times_ms.size}")
    return checked_times(name, times_ms)


def _checked_delay(one_way_ms: float) -> float:
    return float(checked_times("one_way_ms", one_way_ms))


def _checked_costs(costs: Costs) -> tuple[float, float, float]:
    for name in ("draft_ms", "verify_ms", "verify_ms_per_token"):
        checked_times(name, getattr(costs, name))
    return costs.draft_ms, costs.verify_ms, costs.verify_ms_per_token


def _linear_costs(costs: Costs, acceptance_rate: float) -> tuple[float, float]:
    """a and f of a round's a·k + f, where the acceptance rate allows a closed form."""
    draft_ms, verify_ms, per_token_ms = _checked_costs(costs)
    if not 0.0 < acceptance_rate < 1.0:
        raise ValueError(f"acceptance_rate must be in (0, 1), got {acceptance_rate}")
    return draft_ms + per_token_ms, verify_ms + per_token_ms
