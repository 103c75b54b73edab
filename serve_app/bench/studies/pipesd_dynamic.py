"""PipeSD as the bandwidth changes: its thresholds and estimates over time, and what they cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from policies.controller import Learned
from policies.links import Direction
from policies.methods import METHODS, Method
from policies.player import Figures, Player
from policies.scenarios import DYNAMIC_MBIT, LAPTOP_MS, RTT_MS, SCENARIOS, Scenario, edge
from policies.simulate import Timeline
from policies.thresholds import Setting
from policies.traces import Trace
from serve_app.bench.studies.pipesd import PAPER_WIRE, paper_sized
from serve_app.bench.studies.report import Report, Table
from serve_app.bench.trials import SPLITS, THRESHOLDS, Workload

SCENARIO = paper_sized(SCENARIOS["dynamic"])
SEEDS = (0, 1, 2, 3)
SAMPLE_TOKENS = 200  # between two rows of the time series
WORSE = 1.05  # over the best fixed setting, to count as sub-optimal
SELF_TUNED, FIXED = "self-tuned", "fixed at its start"


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens that were committed together, and what the edge node took for true then.

    α and β are those of PipeSD's model: what a request takes besides its drafts, and each draft.
    """

    at_ms: float
    tokens: int
    ms: float
    mbit: float  # the link's own
    setting: Setting
    startup_ms: float | None
    token_ms: float | None
    draft_ms: float


class _Recorded(Learned):
    """What a node learns, and a sample of it whenever tokens are committed."""

    def __init__(self, method: Method, seed: int, timeline: Timeline) -> None:
        super().__init__(method, seed=seed, wire=SCENARIO.wire)
        self._timeline = timeline
        self._link = Direction(SCENARIO.uplink, np.random.default_rng(0))
        self.samples: list[Sample] = []

    def committed(self, setting: Setting, count: int, ms: float) -> None:
        super().committed(setting, count, ms)
        now_ms = self._timeline.now_ms
        link = None if self.environment is None else self.environment.link
        self.samples.append(
            Sample(
                now_ms,
                count,
                ms,
                round(self._link.phase(now_ms)[0].bytes_per_ms * 8e-3, 6),
                setting,
                None if link is None else link.overhead_ms,
                None if link is None else SCENARIO.wire.draft_bytes * link.ms_per_byte,
                self.draft_ms,
            )
        )


@dataclass(frozen=True, slots=True)
class Course:
    """One run over both splits of a data set."""

    samples: tuple[Sample, ...]
    retunes: int
    changes: int  # of the environment, that the monitor saw
    evaluation: Figures


def course(trace: Trace, dataset: str, kind: str, seed: int) -> Course:
    """PipeSD in the dynamic scenario: tuning itself, or at the thresholds that it starts from."""
    method = METHODS["pipesd"]
    if kind == FIXED:
        method = replace(method, learner="none")
    player = Player(SCENARIO, method, seed=seed)
    learned = _Recorded(method, seed, player.timeline)
    player.learned = learned
    workload = Workload(dataset, trace)
    played = [player.play(workload.pairs(SCENARIO, split), workload.end_ids) for split in SPLITS]
    retunes = 0 if learned.tuner is None else learned.tuner.retunes
    return Course(tuple(learned.samples), retunes, learned.monitor.changes, played[-1])


def phase_tpt_ms(trace: Trace, dataset: str, mbit: float, setting: Setting) -> float:
    """TPT on the evaluation split of constant thresholds while the bandwidth stays what it is."""
    scenario: Scenario = edge(LAPTOP_MS, RTT_MS, wire=PAPER_WIRE, mbit=(mbit,))
    method = replace(METHODS["pipesd"], learner="none", **setting._asdict())
    workload = Workload(dataset, trace)
    return (
        Player(scenario, method).play(workload.pairs(scenario, "evaluate"), workload.end_ids).tpt_ms
    )


def pipesd_dynamic(
    trace: Trace, seeds: Sequence[int] = SEEDS, thresholds: Sequence[float] = THRESHOLDS
) -> Report:
    """Time series of R1, R2 and the estimates, and the share of time at sub-optimal thresholds."""
    dataset = trace.datasets[0]
    grid = [Setting(*pair) for pair in product(thresholds, thresholds)]
    courses, steady = _played(trace, dataset, seeds, grid)
    best = {mbit: min(steady[mbit, setting] for setting in grid) for mbit in DYNAMIC_MBIT}
    results = [
        (kind, seed, each, *_regret(each.samples, steady, best))
        for (kind, seed), each in courses.items()
    ]
    series = results[0][2].samples
    return Report(
        "pipesd-dynamic",
        "PipeSD while the bandwidth changes",
        f"Dynamic scenario ({', '.join(f'{m:g}' for m in DYNAMIC_MBIT)} Mbit/s, another every "
        f"20 s), paper-sized messages, {dataset}, both splits in a row. Sub-optimal is a setting "
        f"whose TPT at the bandwidth of the moment, were it to stay, is over {WORSE:g} times that "
        "of the best setting of the grid there.",
        (
            _results_table(results),
            Table(
                "Best fixed thresholds by bandwidth",
                ("Mbit/s", "TPT ms", "R1", "R2", "worst of the grid ms"),
                tuple(_phase_row(mbit, steady, grid) for mbit in sorted(DYNAMIC_MBIT)),
            ),
            _series_table(series, seeds[0]),
        ),
        _remarks(results, series),
        {
            "runs": [_figures(result) for result in results],
            "series": [_series_row(sample) for sample in _spaced(series)],
        },
    )


Result = tuple[str, int, Course, float, float]
Steady = dict[tuple[float, Setting], float]  # TPT if the bandwidth stayed what it is


def _played(
    trace: Trace, dataset: str, seeds: Sequence[int], grid: Sequence[Setting]
) -> tuple[dict[tuple[str, int], Course], Steady]:
    """All runs, and the TPT of each setting that they used or the grid has, by bandwidth."""
    runs = [(SELF_TUNED, seed) for seed in seeds] + [(FIXED, 0)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        played = pool.map(partial(course, trace, dataset), *zip(*runs, strict=True))
        courses = dict(zip(runs, played, strict=True))
        used = {(s.mbit, s.setting) for each in courses.values() for s in each.samples}
        asked = sorted(used | set(product(DYNAMIC_MBIT, grid)))
        taken = pool.map(
            partial(phase_tpt_ms, trace, dataset), *zip(*asked, strict=True), chunksize=4
        )
        return courses, dict(zip(asked, taken, strict=True))


def _results_table(results: Sequence[Result]) -> Table:
    return Table(
        "Share of time at sub-optimal thresholds",
        (
            *("thresholds", "seed", "TPT ms, evaluation split", "sub-optimal %"),
            *("mean excess %", "changes seen", "searches begun anew"),
        ),
        tuple(
            (
                *(kind, seed, each.evaluation.tpt_ms, 100.0 * share, 100.0 * excess),
                *(each.changes, each.retunes),
            )
            for kind, seed, each, share, excess in results
        ),
    )


def _figures(result: Result) -> dict[str, object]:
    kind, seed, each, share, excess = result
    return {
        "thresholds": kind,
        "seed": seed,
        "tpt_ms": each.evaluation.tpt_ms,
        "suboptimal_share": share,
        "mean_excess": excess,
        "changes": each.changes,
        "retunes": each.retunes,
    }


def _regret(
    samples: Sequence[Sample],
    steady: Steady,
    best: dict[float, float],
) -> tuple[float, float]:
    """The share of time at a setting that is WORSE there, and the mean excess over the best."""
    ms = np.array([sample.ms for sample in samples])
    excess = np.array([steady[s.mbit, s.setting] / best[s.mbit] - 1.0 for s in samples])
    return float(ms @ (excess > WORSE - 1.0) / ms.sum()), float(ms @ excess / ms.sum())


def _phase_row(mbit: float, steady: Steady, grid: Sequence[Setting]) -> tuple[float, ...]:
    best = min(grid, key=lambda setting: steady[mbit, setting])
    return mbit, steady[mbit, best], *best, max(steady[mbit, setting] for setting in grid)


def _spaced(samples: Sequence[Sample]) -> list[Sample]:
    """One sample of every SAMPLE_TOKENS tokens."""
    spaced, tokens = [], SAMPLE_TOKENS
    for sample in samples:
        tokens += sample.tokens
        if tokens >= SAMPLE_TOKENS:
            spaced.append(sample)
            tokens = 0
    return spaced


def _series_row(sample: Sample) -> tuple[float | None, ...]:
    return (
        *(sample.at_ms / 1000.0, sample.mbit, *sample.setting, sample.startup_ms),
        *(sample.token_ms, PAPER_WIRE.draft_bytes * 8e-3 / sample.mbit, sample.draft_ms),
    )


def _series_table(samples: Sequence[Sample], seed: int) -> Table:
    return Table(
        f"Thresholds and estimates over time, self-tuned, seed {seed}",
        (
            *("s", "Mbit/s", "R1", "R2", "α estimate ms", "β estimate ms per draft"),
            *("β", "γ estimate ms"),
        ),
        tuple(_series_row(sample) for sample in _spaced(samples)),
    )


def _remarks(results: Sequence[Result], samples: Sequence[Sample]) -> list[str]:
    tuned = [result for result in results if result[0] == SELF_TUNED]
    (fixed,) = [result for result in results if result[0] == FIXED]
    shares = [share for *_, share, _ in tuned]
    tpts = [each.evaluation.tpt_ms for _, _, each, *_ in tuned]
    known = [s for s in samples if s.token_ms is not None]
    off = [abs((s.token_ms or 0.0) * s.mbit / (PAPER_WIRE.draft_bytes * 8e-3) - 1.0) for s in known]
    right = sum(s.ms for s, error in zip(known, off, strict=True) if error <= 0.15)
    return [
        f"The tuner spends {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the time at "
        f"sub-optimal thresholds, the setting that it starts from {100 * fixed[3]:.0f} %; its TPT "
        f"is {min(tpts):.1f} to {max(tpts):.1f} ms against {fixed[2].evaluation.tpt_ms:.1f} ms.",
        "A phase of 20 s is some hundred tokens, an evaluation is 50: a search of 16 evaluations "
        "sees several bandwidths, and takes what a phase did for what a setting did.",
        f"The estimate of what a draft takes on the link is within 15 % of the truth for "
        f"{100 * right / sum(s.ms for s in known):.0f} % of the time after the first; after a "
        "switch it takes ten messages to see one.",
    ]
