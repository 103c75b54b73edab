"""Draft lengths under a network whose state is seen and moves by a Markov chain [§IV-C, §IV-E].

The states' rounds are one table, `rounds_ms` [states, max_draft_len], the delay included:
`state_rounds_ms` builds the paper's N(k, d(s)) = round_ms[k] + 2 d(s). `prefix` is the curve of
`stopping`. Three questions differ in when the state is seen and what moves it:

- The state is seen before the round, and a fixed share of *rounds* meets it: C_ctx(κ) [§IV-E],
  minimised by `best_draft_lens`. The paper's delay is paid once a round, whatever was drafted, so
  it shifts all lengths of a state alike, one length is best for all states, and knowing the state
  is worth exactly nothing; Theorem 5 holds with equality. Only a state that changes what a *draft*
  costs (bytes on a thin uplink, say) makes lengths differ here. The per-state optima k*(s) of §V-D
  are no better than one blind length by this measure, and can be worse.
- The state is seen before the round, and a fixed share of *time* passes in it, as in a network that
  moves by the clock: `time_weighted_cost`. Then k*(s) is best in each state, and knowing the state
  is worth something exactly where no one length is optimal in all of them.
- The state moves while drafting, and is seen after each draft: `best_stopping_rule`, the dynamic
  program of Proposition 1. The first question is its special case in which the state stands still
  within a round, transitions = identity.

Every function raises ValueError naming the argument that is out of range; none returns NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from policies.stopping import MIN_MS, Floats, checked_times, expected_committed

_Policy = TypeVar("_Policy")


@dataclass(frozen=True, slots=True, eq=False)
class StoppingRule:
    """Stop at the first draft n, in state s, with `stops[n - 1, s]`; the last row is all True."""

    stops: npt.NDArray[np.bool_]  # [max_draft_len, states]
    cost_ms_per_token: float

    def thresholds(self) -> tuple[int, ...] | None:
        """k*(s) per state if the rule is "stop once n ≥ k*(s)", else None.

        There always are thresholds if the state adds to a convex `round_ms` only a delay: the
        price of the next token then rises with n in every state [hypothesis (i)]. They never fall
        from state to state [Proposition 1] if, besides, the delay does not fall either, transitions
        are stochastically monotone, and a worse state improves faster: E[d(s')|s] - d(s) falls.
        """
        if (self.stops[1:] < self.stops[:-1]).any():
            return None
        return tuple(int(n) + 1 for n in self.stops.argmax(axis=0))


def stationary_distribution(transitions: Floats) -> Floats:
    """The share of steps that a chain spends in each state, [states], from any start.

    `transitions[s, t]` is the probability of going from s to t. ValueError if the share depends on
    the start, as it does where two sets of states are closed.
    """
    states = len(np.atleast_1d(transitions))
    chain = _checked_transitions(transitions, states)
    reaches = np.linalg.matrix_power((chain > 0.0) | np.eye(states, dtype=bool), states)
    if not reaches.all(axis=0).any():
        raise ValueError("transitions must have one stationary distribution, got several")
    # the states leave the chain one by one, last the one that every state reaches: additions only,
    # so that even rare states get their share to full precision (Grassmann, Taksar and Heyman)
    order = np.argsort(~reaches.all(axis=0), kind="stable")
    chain = chain[np.ix_(order, order)]
    shares = np.zeros(states)
    shares[0] = 1.0
    with np.errstate(all="ignore"):
        for n in range(states - 1, 0, -1):
            chain[:n, n] /= chain[n, :n].sum()
            chain[:n, :n] += np.outer(chain[:n, n], chain[n, :n])
        for n in range(1, states):
            shares[n] = shares[:n] @ chain[:n, n]
    if not np.isfinite(shares.sum()):
        raise ValueError("transitions must not be so rare that shares overflow")
    return np.asarray((shares / shares.sum())[np.argsort(order)])


def state_rounds_ms(round_ms: Floats, one_way_ms: Floats) -> Floats:
    """N(k, d(s)) = round_ms[k] + 2 d(s), [states, max_draft_len], in which only the delay varies.

    `one_way_ms` is [states]: the mean delay in each.
    """
    delays_ms = 2.0 * checked_times("one_way_ms", one_way_ms)
    return _checked_rounds(np.add.outer(delays_ms, checked_times("round_ms", round_ms)))


def round_weighted_cost(
    rounds_ms: Floats, prefix: Floats, round_shares: Floats, draft_lens: Sequence[int]
) -> float:
    """C_ctx(κ), the cost of drafting κ(s) = `draft_lens[s]` where a share π_s of rounds meets s.

    Σ π_s N(κ(s), s) / Σ π_s B(κ(s)), the ratio of sums [§IV-E].
    """
    rounds_ms, committed = _checked_model(rounds_ms, prefix)
    shares = _checked_shares("round_shares", round_shares, len(rounds_ms))
    lens = _checked_lens(draft_lens, rounds_ms)
    return float(
        shares @ rounds_ms[np.arange(len(lens)), lens - 1] / (shares @ committed[lens - 1])
    )


def time_weighted_cost(
    rounds_ms: Floats, prefix: Floats, time_shares: Floats, draft_lens: Sequence[int]
) -> float:
    """The cost of drafting `draft_lens[s]` where a share of *time* passes in s, in long stays.

    Each state commits B / N tokens per millisecond of it, so the cost is their weighted harmonic
    mean, and the lengths of `per_state_draft_lens` minimise it, each in its own state.
    """
    rounds_ms, committed = _checked_model(rounds_ms, prefix)
    shares = _checked_shares("time_shares", time_shares, len(rounds_ms))
    lens = _checked_lens(draft_lens, rounds_ms)
    rates = committed[lens - 1] / rounds_ms[np.arange(len(lens)), lens - 1]
    return float(1.0 / (shares @ rates))


def per_state_draft_lens(rounds_ms: Floats, prefix: Floats) -> tuple[int, ...]:
    """k*(s), the shortest draft of the lowest cost in each state by itself [§V-D]."""
    rounds_ms, committed = _checked_model(rounds_ms, prefix)
    return tuple(int(i) + 1 for i in np.argmin(rounds_ms / committed, axis=1))


def best_draft_lens(rounds_ms: Floats, prefix: Floats, round_shares: Floats) -> tuple[int, ...]:
    """The κ of the lowest C_ctx(κ), out of all max_draft_len^states.

    At a price λ per committed token the states part, and each takes argmin N(k, s) - λ B(k);
    Dinkelbach's iteration finds the λ at which that gains nothing, C_ctx*.
    """
    rounds_ms, committed = _checked_model(rounds_ms, prefix)
    shares = _checked_shares("round_shares", round_shares, len(rounds_ms))
    states = np.arange(len(rounds_ms))

    def best_at(price: float) -> tuple[npt.NDArray[np.intp], float]:
        best = np.argmin(rounds_ms - price * committed, axis=1)
        return best, float(shares @ rounds_ms[states, best] / (shares @ committed[best]))

    best, _ = _dinkelbach(best_at)
    return tuple(int(i) + 1 for i in best)


def best_stopping_rule(
    rounds_ms: Floats, prefix: Floats, transitions: Floats, start_shares: Floats
) -> StoppingRule:
    """The rule of least expected ms / expected tokens, from seeing s_n after draft n [Prop. 1].

    `start_shares` is the law of s_1; `transitions` moves the state once per draft. Every round
    starts from that law, as in the paper: what the state at a round's end says about the next
    round is not used. O(max_draft_len · states²) per step of Dinkelbach's iteration.
    """
    rounds_ms, committed = _checked_model(rounds_ms, prefix)
    transitions = _checked_transitions(transitions, len(rounds_ms))
    start = _checked_shares("start_shares", start_shares, len(rounds_ms))

    def best_at(price: float) -> tuple[npt.NDArray[np.bool_], float]:
        """The backward recursion, Eq. 18: stop where that costs no more than going on."""
        max_draft_len = committed.size
        stops = np.ones((max_draft_len, len(rounds_ms)), dtype=bool)
        ms, tokens = rounds_ms[:, -1], np.full(len(rounds_ms), committed[-1])
        for n in range(max_draft_len - 2, -1, -1):
            ms, tokens = transitions @ ms, transitions @ tokens
            now = rounds_ms[:, n] - price * committed[n] <= ms - price * tokens
            ms, tokens = np.where(now, rounds_ms[:, n], ms), np.where(now, committed[n], tokens)
            stops[n] = now
        return stops, float(start @ ms / (start @ tokens))

    return StoppingRule(*_dinkelbach(best_at))


def value_of_information_ms(
    rounds_ms: Floats, prefix: Floats, transitions: Floats, start_shares: Floats
) -> float:
    """What seeing the state while drafting saves per token, against the best length fixed blindly.

    Never negative [Theorem 5]. With transitions = identity, and states that differ in delay only,
    it is zero: see the module's docstring.
    """
    rounds_ms, committed = _checked_model(rounds_ms, prefix)
    transitions = _checked_transitions(transitions, len(rounds_ms))
    law = _checked_shares("start_shares", start_shares, len(rounds_ms))
    blind_ms = np.inf
    for n, tokens in enumerate(committed):
        blind_ms = min(blind_ms, float(law @ rounds_ms[:, n] / tokens))
        law = law @ transitions
    seen_ms = best_stopping_rule(rounds_ms, prefix, transitions, start_shares).cost_ms_per_token
    return max(0.0, blind_ms - seen_ms)


def time_weighted_value_ms(rounds_ms: Floats, prefix: Floats, time_shares: Floats) -> float:
    """What `per_state_draft_lens` saves per token against the best one length, by shares of time.

    Never negative, and zero if and only if one length is optimal in every state that occurs.
    """
    lens = per_state_draft_lens(rounds_ms, prefix)
    blind_ms = min(
        time_weighted_cost(rounds_ms, prefix, time_shares, [k] * len(lens))
        for k in range(1, len(prefix) + 1)
    )
    return max(0.0, blind_ms - time_weighted_cost(rounds_ms, prefix, time_shares, lens))


def _dinkelbach(best_at: Callable[[float], tuple[_Policy, float]]) -> tuple[_Policy, float]:
    """The policy of least ms / tokens, and that ratio.

    `best_at(price)` is a policy of least ms - price · tokens, and its own ms / tokens. Priced at a
    ratio that can be had, it has a lower one or there is none; so ratios fall, no policy comes up
    twice, and the loop ends, in a handful of steps [Dinkelbach 1967].
    """
    best = best_at(0.0)
    while (better := best_at(best[1]))[1] < best[1]:
        best = better
    return best


def _checked_rounds(rounds_ms: Floats) -> Floats:
    rounds_ms = np.asarray(rounds_ms, np.float64)
    if rounds_ms.ndim != 2 or not rounds_ms.size:
        raise ValueError(f"rounds_ms must be [states, max_draft_len], got {rounds_ms.shape}")
    return checked_times("rounds_ms", rounds_ms, MIN_MS)


def _checked_model(rounds_ms: Floats, prefix: Floats) -> tuple[Floats, Floats]:
    committed = expected_committed(prefix)
    rounds_ms = _checked_rounds(rounds_ms)
    if rounds_ms.shape[1] != committed.size:
        raise ValueError(f"rounds_ms must have {committed.size} columns, got {rounds_ms.shape[1]}")
    return rounds_ms, committed


def _checked_shares(name: str, shares: Floats, states: int) -> Floats:
    shares = np.asarray(shares, np.float64)
    if shares.shape != (states,):
        raise ValueError(f"{name} must be [{states}], got {shares.shape}")
    if not (shares.min() >= 0.0 and abs(shares.sum() - 1.0) <= 1e-9):
        raise ValueError(f"{name} must be >= 0 and sum to 1, got {shares.tolist()}")
    return np.asarray(shares / shares.sum())


def _checked_transitions(transitions: Floats, states: int) -> Floats:
    transitions = np.asarray(transitions, np.float64)
    if transitions.shape != (states, states):
        raise ValueError(f"transitions must be [{states}, {states}], got {transitions.shape}")
    return np.array([_checked_shares("transitions' rows", row, states) for row in transitions])


def _checked_lens(draft_lens: Sequence[int], rounds_ms: Floats) -> npt.NDArray[np.intp]:
    states, max_draft_len = rounds_ms.shape
    lens = np.asarray(draft_lens)
    if lens.shape != (states,) or lens.dtype.kind != "i":
        raise ValueError(f"draft_lens must be {states} integers, got {draft_lens}")
    if lens.min() < 1 or lens.max() > max_draft_len:
        raise ValueError(f"draft_lens must be in [1, {max_draft_len}], got {draft_lens}")
    return lens.astype(np.intp)
