"""Methods held against each other in one scenario: tuned on one split, measured on the other.

Every candidate first plays the tuning split, on which it also learns what its method learns, and
then the evaluation split, with what it has learned. The candidate that was fastest on the tuning
split is the method's row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from policies.methods import METHODS, Method
from policies.player import AnyPair, Figures, Player
from policies.replay import RenewalPair, ReplayPair, clairvoyant_ms
from policies.scenarios import Scenario
from policies.traces import Split, Trace

SPLITS: tuple[Split, Split] = ("tune", "evaluate")
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)
DRAFT_LENS = tuple(range(1, 13))
PRICES_MS = (0.0, *(round(2.0 * 1.3**step, 1) for step in range(20)))
SYNTHETIC = "synthetic"
SYNTHETIC_PROMPTS, SYNTHETIC_TOKENS = 20, 128  # of each split
EDGE_ONLY = "edge-only"

Settings = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """Pairs of both splits of one data set, as the simulator takes them; made anew for each use."""

    dataset: str
    trace: Trace | None  # None: synthetic, by the scenario's rates

    def pairs(self, scenario: Scenario, split: Split) -> list[AnyPair]:
        if self.trace is not None:
            return [ReplayPair(prompt) for prompt in self.trace.of(self.dataset, split)]
        assert scenario.rates is not None
        rng = np.random.default_rng(SPLITS.index(split))
        luck = rng.random((SYNTHETIC_PROMPTS, SYNTHETIC_TOKENS)).tolist()
        return [RenewalPair(scenario.rates, each) for each in luck]

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset() if self.trace is None else self.trace.end_ids


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with one setting of what it can be tuned by; none for what tunes itself."""

    name: str
    settings: Settings
    method: Method


@dataclass(frozen=True, slots=True)
class Trial:
    """What a candidate came to on both splits."""

    candidate: Candidate
    tuning: Figures
    evaluation: Figures


@dataclass(frozen=True, slots=True)
class Row:
    """A method at its best setting; `trials` are all of its settings."""

    dataset: str
    name: str
    best: Trial
    trials: tuple[Trial, ...]


def workloads(scenario: Scenario, trace: Trace) -> list[Workload]:
    """The trace's data sets, or the synthetic one of a scenario with rates of its own."""
    if scenario.rates is not None:
        return [Workload(SYNTHETIC, None)]
    return [Workload(dataset, trace) for dataset in trace.datasets]


def candidates(name: str) -> list[Candidate]:
    """Every setting of a method that is tried, or the one that it has."""
    method = replace(METHODS[name], learner="none") if name in _DUAL else METHODS[name]
    settings: Iterable[dict[str, Any]]
    if name in _DUAL:
        pairs = product(THRESHOLDS, THRESHOLDS)
        settings = ({"sequence_threshold": r1, "token_threshold": r2} for r1, r2 in pairs)
    elif name in _TUNED:
        field, values = _TUNED[name]
        settings = ({field: value} for value in values)
    else:
        settings = ({},)
    return [Candidate(name, each, replace(method, **each)) for each in settings]


_DUAL = ("pipesd", "pipesd-no-pipeline")
_TUNED: dict[str, tuple[str, tuple[float, ...]]] = {
    "vanilla": ("draft_len", DRAFT_LENS),
    "pipesd-fixed": ("draft_len", DRAFT_LENS),
    "hsl": ("token_threshold", THRESHOLDS),
    "pipesd-token": ("token_threshold", THRESHOLDS),
    "edgellm": ("sequence_threshold", THRESHOLDS),
    "pipesd-sequence": ("sequence_threshold", THRESHOLDS),
    "specdecpp": ("rejection_threshold", THRESHOLDS),
    "outrider": ("nav_price_ms", PRICES_MS),
}
TUNABLE = frozenset({*_DUAL, *_TUNED})


def try_out(scenario: Scenario, workload: Workload, candidate: Candidate) -> Trial:
    """Play both splits, one after the other, on one node."""
    player = Player(scenario, candidate.method)
    tuning, evaluation = (
        player.play(workload.pairs(scenario, split), workload.end_ids) for split in SPLITS
    )
    return Trial(candidate, tuning, evaluation)


def compare(scenario: Scenario, trace: Trace, names: Sequence[str] = tuple(METHODS)) -> list[Row]:
    """A row for each data set and method, from trials on all cores."""
    jobs = [
        (workload, candidate)
        for workload in workloads(scenario, trace)
        for name in names
        for candidate in candidates(name)
    ]
    with ProcessPoolExecutor(os.cpu_count(), initializer=_remember, initargs=(trace,)) as pool:
        asked = [(workload.dataset, candidate) for workload, candidate in jobs]
        trials = list(pool.map(partial(_try_out, scenario), asked, chunksize=4))
    rows = []
    for workload in workloads(scenario, trace):
        of_set = [
            trial
            for (w, _), trial in zip(jobs, trials, strict=True)
            if w.dataset == workload.dataset
        ]
        rows += [_row(workload.dataset, name, of_set) for name in names]
    return rows


_trace: Trace | None = None  # of a worker process, which gets it once


def _remember(trace: Trace) -> None:
    global _trace
    _trace = trace


def _try_out(scenario: Scenario, asked: tuple[str, Candidate]) -> Trial:
    dataset, candidate = asked
    trace = None if dataset == SYNTHETIC else _trace
    return try_out(scenario, Workload(dataset, trace), candidate)


def _row(dataset: str, name: str, trials: Sequence[Trial]) -> Row:
    own = tuple(trial for trial in trials if trial.candidate.name == name)
    allowed = own
    rivals = [trial for trial in trials if trial.candidate.name == "pipesd"]
    if name == "outrider" and rivals:
        # ours is given no more of the verifier than PipeSD takes at its fastest
        limit = _fastest(rivals).tuning.navs_per_token
        allowed = tuple(trial for trial in own if trial.tuning.navs_per_token <= limit) or own[-1:]
    return Row(dataset, name, _fastest(allowed), own)


def _fastest(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.tuning.tpt_ms)


def clairvoyant_tpt_ms(scenario: Scenario, workload: Workload) -> float:
    """The bound of `clairvoyant_ms` over the evaluation split, at the scenario's best times."""
    pairs = workload.pairs(scenario, "evaluate")
    verify = scenario.verify
    total_ms = sum(
        clairvoyant_ms(
            pair.mistakes,
            pair.max_tokens,
            draft_ms=min(scenario.draft_ms),
            rtt_ms=scenario.least_rtt_ms,
            verify_ms=verify.verify_ms + verify.verify_ms_per_token,
        )
        for pair in pairs
    )
    return total_ms / sum(pair.max_tokens for pair in pairs)
