"""What UCB-SpecStop's rounds pass on: R1 measures costs, R2 acceptance, R3 the best length.

The paper's calibrated_state.json (§VI-A), one for each suite. A later round that finds an entry
missing raises; there are no defaults to fall back to. All three play the tuning split.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TypeVar

import numpy as np

from policies.costs import Costs
from policies.stopping import (
    Floats,
    calibrated_draft_len,
    critical_one_way_ms,
    geometric_critical_one_way_ms,
    greedy_draft_len,
    optimal_draft_len,
    theory_draft_len,
)
from serve_app.bench.studies.specstop_rounds import (
    ARMS,
    DELAYS_MS,
    MAX_DRAFT_LEN,
    Suite,
    cost_ms,
    fixed,
    play,
)

GRID_LENS = (1, 2, 3, 4, 5, 7, 10)  # of R3 (B1 of §VI-D)
SEED = 0
ROUNDS = (100, 4000, 300)  # of R1, R2 and R3


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """R1, by draft length: c_d(k) and c_v(k), a forward being (k + 1)·c_v(k); no delay injected."""

    draft_lens: tuple[int, ...]
    draft_ms_per_token: tuple[float, ...]
    verify_ms_per_token: tuple[float, ...]
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """R2: q̂(k) for k = 1 … MAX_DRAFT_LEN, and the tail's constant rate, α_geo of k >= 2."""

    prefix: tuple[float, ...]
    tail_rate: float


@dataclass(frozen=True, slots=True)
class BestLens:
    """R3: the length of the lowest measured cost at each injected delay, and that cost."""

    one_way_ms: tuple[float, ...]
    draft_lens: tuple[int, ...]
    cost_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CalibratedState:
    """What is known of a suite so far. Asking for what is not raises ValueError naming its round.

    Delays are the injected ones; the base round trip of R1 comes on top.
    """

    suite: str
    costs: MeasuredCosts | None = None
    acceptance: Acceptance | None = None
    best: BestLens | None = None

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> CalibratedState:
        """What `write` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        saved = json.loads(text)
        return cls(
            saved["suite"],
            _entry(MeasuredCosts, saved["costs"]),
            _entry(Acceptance, saved["acceptance"]),
            _entry(BestLens, saved["best"]),
        )

    def measured(self) -> MeasuredCosts:
        return _known(self.costs, self.suite, "R1")

    def accepted(self) -> Acceptance:
        return _known(self.acceptance, self.suite, "R2")

    def prefix(self) -> Floats:
        """q̂(k), [MAX_DRAFT_LEN]."""
        return np.array(self.accepted().prefix)

    def round_ms(self) -> Floats:
        """k·c_d(k) + (k + 1)·c_v(k), [MAX_DRAFT_LEN], linear between the lengths measured."""
        costs = self.measured()
        lens = np.array(costs.draft_lens, np.float64)
        known = lens * costs.draft_ms_per_token + (lens + 1.0) * costs.verify_ms_per_token
        return np.asarray(np.interp(np.arange(1.0, MAX_DRAFT_LEN + 1), lens, known))

    def mean_costs(self) -> Costs:
        """c̄_d and c̄_v, means over the lengths measured."""
        costs = self.measured()
        per_token_ms = fmean(costs.verify_ms_per_token)
        return Costs(fmean(costs.draft_ms_per_token), 0.0, per_token_ms)

    def delay_ms(self, injected_ms: float) -> float:
        """The effective one-way delay [§VI-B]."""
        return injected_ms + self.measured().rtt_ms / 2.0

    def greedy_len(self) -> int:
        """B2."""
        return greedy_draft_len(self.round_ms(), self.prefix())

    def theory_len(self, injected_ms: float) -> int:
        """B4."""
        delay_ms, rate = self.delay_ms(injected_ms), self.accepted().tail_rate
        return theory_draft_len(self.mean_costs(), rate, delay_ms, MAX_DRAFT_LEN)

    def calibrated_len(self, injected_ms: float) -> int:
        """B5."""
        rate = self.accepted().tail_rate
        return calibrated_draft_len(self.round_ms(), rate, self.delay_ms(injected_ms))

    def empirical_len(self, injected_ms: float) -> int:
        """B6 by the curves of R1 and R2."""
        return optimal_draft_len(self.round_ms(), self.prefix(), self.delay_ms(injected_ms))

    def best_len(self, injected_ms: float) -> int:
        """B6 as R3 measured it. Raises ValueError for a delay that is none of R3's."""
        best, at = self._best_at(injected_ms)
        return best.draft_lens[at]

    def best_cost_ms(self, injected_ms: float) -> float:
        """What `best_len` cost per token then."""
        best, at = self._best_at(injected_ms)
        return best.cost_ms[at]

    def _best_at(self, injected_ms: float) -> tuple[BestLens, int]:
        best = _known(self.best, self.suite, "R3")
        if injected_ms not in best.one_way_ms:
            raise ValueError(f"{self.suite}: R3 lacks one_way_ms {injected_ms:g}")
        return best, best.one_way_ms.index(injected_ms)

    def critical_ms(self) -> float:
        """d_c, injected, by the curves of R1 and R2; may be negative, or infinite."""
        return critical_one_way_ms(self.round_ms(), self.prefix()) - self.delay_ms(0.0)

    def geometric_critical_ms(self) -> float:
        """d_c, injected, by Eq. 24."""
        closed_ms = geometric_critical_one_way_ms(self.mean_costs(), self.accepted().tail_rate)
        return closed_ms - self.delay_ms(0.0)


_T = TypeVar("_T")


def _known(entry: _T | None, suite: str, name: str) -> _T:
    if entry is None:
        raise ValueError(f"the calibrated state of {suite} lacks {name}: play it first")
    return entry


def _entry(kind: type[_T], saved: dict[str, object] | None) -> _T | None:
    if saved is None:
        return None
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
    return kind(**values)


# ---- the rounds


def measure_costs(suite: Suite, rounds: int) -> CalibratedState:
    """R1: so many rounds of each arm without an injected delay."""
    draft_ms, verify_ms, rtt_ms = [], [], []
    for arm in ARMS:
        played = play(suite, 0.0, fixed(arm), rounds, "tune", SEED)
        draft_ms.append(fmean(r.ms - r.answer_ms for r in played) / arm)
        verify_ms.append(fmean(r.verify_ms for r in played) / (arm + 1))
        rtt_ms += [r.answer_ms - r.verify_ms for r in played]
    costs = MeasuredCosts(ARMS, tuple(draft_ms), tuple(verify_ms), fmean(rtt_ms))
    return CalibratedState(suite.name, costs)


def measure_acceptance(suite: Suite, state: CalibratedState, rounds: int) -> CalibratedState:
    """R2: so many rounds of the longest draft."""
    state.measured()
    played = play(suite, 0.0, fixed(MAX_DRAFT_LEN), rounds, "tune", SEED)
    stood = np.array([r.committed - 1 for r in played])
    prefix = (stood[:, None] >= np.arange(1, MAX_DRAFT_LEN + 1)).mean(axis=0)
    tail_rate = float(prefix[1:].sum() / prefix[:-1].sum())
    return replace(state, acceptance=Acceptance(tuple(prefix.tolist()), tail_rate))


def measure_best(
    suite: Suite, state: CalibratedState, rounds: int, delays_ms: Sequence[float] = DELAYS_MS
) -> CalibratedState:
    """R3: so many rounds of each length at each delay."""
    state.accepted()
    best_lens, best_ms = [], []
    for delay_ms in delays_ms:
        costs_ms = {
            k: cost_ms(play(suite, delay_ms, fixed(k), rounds, "tune", SEED)) for k in GRID_LENS
        }
        best = min(costs_ms, key=lambda k: costs_ms[k])
        best_lens.append(best)
        best_ms.append(costs_ms[best])
    best_of = BestLens(tuple(delays_ms), tuple(best_lens), tuple(best_ms))
    return replace(state, best=best_of)


def calibrate(
    suite: Suite,
    delays_ms: Sequence[float] = DELAYS_MS,
    rounds: tuple[int, int, int] = ROUNDS,
) -> CalibratedState:
    """R1, R2 and R3, with so many rounds each."""
    state = measure_costs(suite, rounds[0])
    state = measure_acceptance(suite, state, rounds[1])
    return measure_best(suite, state, rounds[2], delays_ms)
