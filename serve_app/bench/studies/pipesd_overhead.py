"""What PipeSD's control costs: Table 5, measured wall time against simulated generation time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from policies.autotune import Autotuner
from policies.controller import TUNE_BUDGET
from policies.environment import Environment, EnvironmentMonitor
from policies.methods import METHODS, Method
from policies.player import Player
from policies.scenarios import SCENARIOS
from policies.thresholds import Bounds, Setting
from policies.token_batches import plan as schedule
from policies.traces import Trace
from serve_app.bench.control import schedule_us
from serve_app.bench.studies.pipesd import paper_sized
from serve_app.bench.studies.report import Report, Table
from serve_app.bench.trials import SPLITS, Workload

METHOD = METHODS["pipesd"]
REPEATS = 3
# shares of the generation time in %, HumanEval and GSM8K
PAPER_SHARES = {
    "BO autotuner": {"humaneval": 1.1, "gsm8k": 0.9},
    "DP schedule": {"humaneval": 0.01, "gsm8k": 0.013},
    "measuring": {"humaneval": 0.3, "gsm8k": 0.4},
}


Result = TypeVar("Result")


class Stopwatch:
    """Wall time in milliseconds, summed over calls."""

    def __init__(self) -> None:
        self.ms = 0.0

    def time(self, call: Callable[[], Result]) -> Result:
        began_s = time.perf_counter()
        try:
            return call()
        finally:
            self.ms += (time.perf_counter() - began_s) * 1000.0


class _TimedTuner(Autotuner):
    """The autotuner, with the time that it takes."""

    def __init__(self, method: Method, seed: int, watch: Stopwatch) -> None:
        default = Setting(method.sequence_threshold, method.token_threshold)
        super().__init__(default, bounds=Bounds(), budget=TUNE_BUDGET, seed=seed)
        self._stopwatch = watch

    def ask(self) -> Setting:
        return self._stopwatch.time(super().ask)

    def tell(self, setting: Setting, tpt_ms: float | None) -> None:
        self._stopwatch.time(partial(super().tell, setting, tpt_ms))


class _TimedMonitor(EnvironmentMonitor):
    """The monitor, with the time that it takes."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._stopwatch = watch

    def observe_draft(self, ms: float) -> None:
        self._stopwatch.time(partial(super().observe_draft, ms))

    def observe_verify(self, num_ids: int, ms: float) -> None:
        self._stopwatch.time(partial(super().observe_verify, num_ids, ms))

    def observe_round_trip(self, num_bytes: int, ms: float) -> None:
        self._stopwatch.time(partial(super().observe_round_trip, num_bytes, ms))

    def observe_send(self, num_bytes: int, ms: float) -> None:
        self._stopwatch.time(partial(super().observe_send, num_bytes, ms))

    def snapshot(self) -> Environment | None:
        return self._stopwatch.time(super().snapshot)


@dataclass(frozen=True, slots=True)
class Shares:
    """Wall time of each part over one run's simulated generation time, and how often."""

    generation_ms: float
    tuner_ms: float
    schedule_ms: float
    measuring_ms: float
    schedules_anew: int
    tokens: int

    def percent(self) -> dict[str, float]:
        parts = (self.tuner_ms, self.schedule_ms, self.measuring_ms)
        return {
            name: 100.0 * ms / self.generation_ms
            for name, ms in zip(PAPER_SHARES, parts, strict=True)
        }


def shares(workload: Workload, seed: int) -> Shares:
    """PipeSD as it is, tuning itself, over both splits of a data set.

    Schedules are counted, new ones and those from the cache, and each taken for the median time of
    its kind by `control.schedule_us`.
    """
    scenario = paper_sized(SCENARIOS["laptop"])
    player = Player(scenario, METHOD, seed=seed)
    tuning, measuring = Stopwatch(), Stopwatch()
    player.learned.tuner = _TimedTuner(METHOD, seed, tuning)
    player.learned.monitor = _TimedMonitor(measuring)
    schedule.cache_clear()
    played = [player.play(workload.pairs(scenario, split), workload.end_ids) for split in SPLITS]
    cache = schedule.cache_info()
    anew_us, cached_us = schedule_us()
    return Shares(
        sum(figures.ms for figures in played),
        tuning.ms,
        (cache.misses * anew_us + cache.hits * cached_us) / 1000.0,
        measuring.ms,
        cache.misses,
        sum(figures.tokens for figures in played),
    )


def pipesd_overhead(trace: Trace, repeats: int = REPEATS) -> Report:
    """Table 5. The shares are of this machine's wall time, and so differ from run to run."""
    runs = {
        dataset: [shares(Workload(dataset, trace), seed) for seed in range(repeats)]
        for dataset in trace.datasets
    }
    rows = []
    for dataset, of_set in runs.items():
        for name in PAPER_SHARES:
            values = sorted(run.percent()[name] for run in of_set)
            paper = PAPER_SHARES[name].get(dataset)
            rows.append((dataset, name, values[len(values) // 2], values[0], values[-1], paper))
    schedules = sum(run.schedules_anew for of_set in runs.values() for run in of_set)
    tokens = sum(run.tokens for of_set in runs.values() for run in of_set)
    return Report(
        "pipesd-overhead",
        "PipeSD, Table 5: what control costs",
        f"Laptop with paper-sized messages, {repeats} runs over both splits, the tuner's search "
        f"of {TUNE_BUDGET} evaluations included; wall time on this machine (Python, one core) over "
        "simulated generation time.",
        (
            Table(
                "Share of the generation time in %",
                ("data set", "part", "median", "lowest", "highest", "paper"),
                tuple(rows),
            ),
        ),
        [
            "The tuner's Gaussian process is fitted in a thread while its last setting serves, so "
            "its share delays no token; the simulation lets it take no time.",
            f"A schedule was computed anew {1000.0 * schedules / tokens:.1f} times per 1,000 "
            "tokens; the others came from a cache by exact costs.",
            "The share falls with the length of the run, since the search ends; the paper does not "
            "say how long its runs are.",
        ],
        {
            dataset: [_keys(run.percent()) | {"generation_ms": run.generation_ms} for run in of_set]
            for dataset, of_set in runs.items()
        },
    )


def _keys(percent: dict[str, float]) -> dict[str, float]:
    """Names fit for a program."""
    return {f"{name.lower().replace(' ', '_')}_percent": value for name, value in percent.items()}
