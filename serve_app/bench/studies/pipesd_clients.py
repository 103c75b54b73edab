"""Many clients on one verifier: what bursty triggers do to its queue (PipeSD, appendix I)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean

import numpy as np

from policies.player import Figures, Player, play_together
from policies.scenarios import SCENARIOS, Scenario
from policies.simulate import SharedVerifier, Timeline
from policies.traces import Trace
from serve_app.bench.studies.report import Cell, Report, Table
from serve_app.bench.trials import Candidate, Row, Trial, Workload, compare

SCENARIO_NAME = "laptop-ids"
CLIENTS = (1, 2, 4, 8, 16)
REPEATS = 3
JITTER_MS = 5.0  # without any, clients of equal rounds fall into step
REFERENCE = "pipesd"  # whose load the others are set to
METHODS_HELD = ("pipesd", "vanilla", "pipesd-fixed", "outrider")


@dataclass(frozen=True, slots=True)
class Queue:
    """What so many clients at once met at the verifier."""

    name: str
    clients: int
    tpt_ms: float
    requests: int
    mean_wait_ms: float
    p95_wait_ms: float
    waited: float  # share of the requests that waited at all
    forwards_per_request: float
    busy: float  # share of the time


def jittery() -> Scenario:
    """The scenario with exponential jitter on its link."""
    scenario = SCENARIOS[SCENARIO_NAME]
    phases = tuple(replace(phase, jitter_ms=JITTER_MS) for phase in scenario.uplink.phases)
    return replace(scenario, uplink=replace(scenario.uplink, phases=phases))


def load(figures: Figures) -> float:
    """Milliseconds of the verifier that one client asks for per millisecond."""
    return figures.verifier_ms / figures.ms


def of_equal_load(trials: Sequence[Trial], wanted: float) -> Trial:
    """The setting whose load on the tuning split is nearest to the wanted one."""
    return min(trials, key=lambda trial: abs(load(trial.tuning) - wanted))


def queue(trace: Trace, dataset: str, candidate: Candidate, num_clients: int, repeat: int) -> Queue:
    """Clients that all play the evaluation split, each from another prompt on."""
    scenario, workload = jittery(), Workload(dataset, trace)
    timeline = Timeline()
    verifier = SharedVerifier(timeline, scenario.verify, prefill_ms=0.0)
    players = [
        Player(scenario, candidate.method, seed=seed, timeline=timeline, verifier=verifier)
        for seed in range(repeat * num_clients, (repeat + 1) * num_clients)
    ]
    lists = []
    for number in range(num_clients):
        pairs = workload.pairs(scenario, "evaluate")
        first = number * len(pairs) // num_clients
        lists.append(pairs[first:] + pairs[:first])
    played = play_together(players, lists, workload.end_ids)
    waits_ms = np.array(verifier.waited_ms)
    return Queue(
        candidate.name,
        num_clients,
        sum(figures.ms for figures in played) / sum(figures.tokens for figures in played),
        waits_ms.size,
        float(waits_ms.mean()),
        float(np.percentile(waits_ms, 95)),
        float(np.mean(waits_ms > 0.0)),
        verifier.forwards / waits_ms.size,
        verifier.busy_ms / timeline.now_ms,
    )


def pipesd_clients(
    trace: Trace, clients: Sequence[int] = CLIENTS, repeats: int = REPEATS
) -> Report:
    """Waiting time at the verifier under each trigger, at about equal load per client."""
    scenario = jittery()
    dataset = trace.datasets[0]
    own = tuple(prompt for prompt in trace.prompts if prompt.dataset == dataset)
    trace = replace(trace, prompts=own)
    chosen = _chosen(compare(scenario, trace, METHODS_HELD))
    jobs = [
        (trial.candidate, n, repeat)
        for trial, n, repeat in product(chosen.values(), clients, range(repeats))
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        queues = list(pool.map(partial(queue, trace, dataset), *zip(*jobs, strict=True)))
    return Report(
        "pipesd-clients",
        "Many clients on one verifier: do bursty triggers queue longer?",
        f"{SCENARIO_NAME} with {JITTER_MS:g} ms of exponential jitter each way, {dataset}, "
        f"evaluation split, {repeats} repeats with other jitter; one verifier of "
        f"{scenario.verify.verify_ms:g} ms per forward which takes all that wait into its next "
        "one. PipeSD at its tuned thresholds; the others at the setting whose load of the "
        "verifier, alone and on the tuning split, is nearest to PipeSD's. Clients begin at the "
        "same time, each with another prompt.",
        (_settings_table(chosen), _queue_table(queues)),
        _remarks(queues, clients),
        {"queues": [asdict(each) for each in queues]},
    )


def _chosen(rows: Sequence[Row]) -> dict[str, Trial]:
    """By name, the trial whose load is the reference's."""
    by_name = {row.name: row for row in rows}
    wanted = load(by_name[REFERENCE].best.tuning)
    return {
        name: row.best if name == REFERENCE else of_equal_load(row.trials, wanted)
        for name, row in by_name.items()
    }


def _settings_table(chosen: Mapping[str, Trial]) -> Table:
    return Table(
        "Settings",
        ("method", "setting", "load of one client, tuning split"),
        tuple(
            (name, _shown(trial.candidate), load(trial.tuning)) for name, trial in chosen.items()
        ),
    )


def _shown(candidate: Candidate) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in candidate.settings.items())


def _queue_table(queues: Sequence[Queue]) -> Table:
    kinds = sorted(dict.fromkeys((q.name, q.clients) for q in queues), key=lambda kind: kind[1])
    rows: list[tuple[Cell, ...]] = []
    for name, clients in kinds:
        own = [q for q in queues if (q.name, q.clients) == (name, clients)]
        waits_ms = [q.mean_wait_ms for q in own]
        rows.append(
            (
                *(clients, name, fmean(q.tpt_ms for q in own), fmean(waits_ms)),
                *(f"{min(waits_ms):.1f} to {max(waits_ms):.1f}", fmean(q.p95_wait_ms for q in own)),
                *(100.0 * fmean(q.waited for q in own), fmean(q.forwards_per_request for q in own)),
                100.0 * fmean(q.busy for q in own),
            )
        )
    return Table(
        "Waiting for a forward to begin, in ms; means over the repeats",
        (
            *("clients", "method", "TPT ms", "mean wait", "of the repeats", "p95 wait"),
            *("waited at all %", "forwards / request", "verifier busy %"),
        ),
        tuple(rows),
    )


def _remarks(queues: Sequence[Queue], clients: Sequence[int]) -> list[str]:
    remarks = []
    for number in clients:
        waits_ms = {
            name: fmean(q.mean_wait_ms for q in queues if (q.name, q.clients) == (name, number))
            for name in METHODS_HELD
        }
        order = sorted(waits_ms, key=lambda name: waits_ms[name])
        shown = ", ".join(f"{name} {waits_ms[name]:.1f}" for name in order)
        remarks.append(f"{number} clients, mean wait in ms, shortest first: {shown}.")
    remarks.append(
        "A verifier that takes all that wait into its next forward never makes a request wait for "
        "more than the forward under way, so a burst costs at most one forward; what it adds shows "
        "in the wait, not in a queue that grows."
    )
    return remarks
