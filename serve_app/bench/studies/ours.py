"""What ours reaches against every tunable method, and against the bound of a single path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from policies.player import Figures
from policies.scenarios import SCENARIOS
from policies.traces import Trace
from serve_app.bench.studies.report import Report, Table
from serve_app.bench.trials import (
    TUNABLE,
    Row,
    clairvoyant_tpt_ms,
    compare,
    workloads,
)

OURS, OURS_FREE, RIVAL = "outrider", "outrider-p0", "pipesd"
PARETO_SCENARIOS = ("rtt50", "rtt300", "npu", "cloud70b")
NAV_LIMITS = (0.1, 0.2, 0.3, 0.5)
ID_LIMITS = (1.1, 1.25, 1.5, 2.0)
FEW_NAVS = 0.3
# ours over PipeSD's fastest, at its NAVs per token or fewer and at up to FEW_NAVS, and price 0 over
# the clairvoyant bound: at most
TARGETS: dict[str, tuple[float, float, float]] = {
    "rtt50": (1.0, 0.98, 1.02),
    "rtt300": (0.97, 0.88, 1.02),
    "npu": (0.98, 0.91, 1.10),
}

Measure = Callable[[Figures], float]


def pareto(
    trace: Trace,
    names: Sequence[str] = PARETO_SCENARIOS,
    methods: Sequence[str] = (*sorted(TUNABLE), OURS_FREE),
) -> Report:
    """TPT against NAVs and against ids per token, of every tunable method, and our targets."""
    tables: list[Table] = []
    checks: list[_Check] = []
    figures: dict[str, Any] = {}
    for name in names:
        scenario = SCENARIOS[name]
        rows = compare(scenario, trace, methods)
        for workload in workloads(scenario, trace):
            own = {row.name: row for row in rows if row.dataset == workload.dataset}
            bound_ms = clairvoyant_tpt_ms(scenario, workload)
            tables.append(_fronts_table(name, workload.dataset, bound_ms, own))
            checks += _checks(name, workload.dataset, bound_ms, own)
            figures[f"{name}/{workload.dataset}"] = {
                "clairvoyant_tpt_ms": bound_ms,
                "fronts": {method: _fronts(row) for method, row in own.items()},
            }
    missed = [check for check in checks if not check.reached]
    return Report(
        "pareto",
        "Ours: speed against the verifier's work",
        f"Scenarios {', '.join(names)}; ids-only messages; every setting of every tunable method "
        "on the evaluation split. A front keeps the settings that no other of the method beats in "
        "both figures. PipeSD's fastest setting is that of the tuning split; ours is the best of "
        'its evaluation front within the limit, and in "tuned" the one of the tuning split within '
        "PipeSD's NAVs there.",
        (_targets_table(checks), *tables),
        _pareto_remarks(checks, missed),
        figures | {"targets": [check.figures() for check in checks]},
    )


@dataclass(frozen=True, slots=True)
class _Check:
    """One target of ours, what is held against what, and how it came out."""

    scenario: str
    dataset: str
    claim: str
    most: float
    ours_ms: float | None  # None: no setting is within the limit
    against_ms: float
    tuned_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.ours_ms is None else self.ours_ms / self.against_ms

    @property
    def reached(self) -> bool:
        return self.ratio is not None and self.ratio <= self.most

    def figures(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "dataset": self.dataset,
            "claim": self.claim,
            "most": self.most,
            "ratio": self.ratio,
            "reached": self.reached,
        }


def _checks(name: str, dataset: str, bound_ms: float, rows: dict[str, Row]) -> list[_Check]:
    """The targets of a scenario, of which it may have none."""
    if name not in TARGETS:
        return []
    equal, few, free = TARGETS[name]
    rival, ours = rows[RIVAL].best.evaluation, rows[OURS]
    free_ms = rows[OURS_FREE].best.evaluation.tpt_ms
    at_equal = _best(ours, _navs, rival.navs_per_token)
    return [
        _Check(
            name,
            dataset,
            f"at PipeSD's {rival.navs_per_token:.3f} NAVs per token",
            equal,
            at_equal,
            rival.tpt_ms,
            ours.best.evaluation.tpt_ms,
        ),
        _Check(
            name,
            dataset,
            f"at up to {FEW_NAVS} NAVs per token",
            few,
            _best(ours, _navs, FEW_NAVS),
            rival.tpt_ms,
        ),
        _Check(name, dataset, "price 0, over the clairvoyant bound", free, free_ms, bound_ms),
    ]


def _targets_table(checks: Sequence[_Check]) -> Table:
    return Table(
        "Ours against PipeSD's fastest setting, and against the bound: the targets",
        ("scenario", "data set", "ours", "ms", "against, ms", "ratio", "at most", "", "tuned"),
        tuple(
            (
                check.scenario,
                check.dataset,
                check.claim,
                check.ours_ms,
                check.against_ms,
                check.ratio,
                check.most,
                "reached" if check.reached else "missed",
                None if check.tuned_ms is None else check.tuned_ms / check.against_ms,
            )
            for check in checks
        ),
    )


def _navs(figures: Figures) -> float:
    return figures.navs_per_token


def _ids(figures: Figures) -> float:
    return figures.verified_per_token


def _best(row: Row, measure: Measure, limit: float) -> float | None:
    """The lowest TPT of the settings within the limit, on the evaluation split."""
    within = [trial.evaluation.tpt_ms for trial in row.trials if measure(trial.evaluation) <= limit]
    return min(within, default=None)


def front(row: Row, measure: Measure) -> list[tuple[dict[str, float], float, float]]:
    """(settings, tpt_ms, measure) of the settings that no other beats in both, cheapest first."""
    points = sorted(
        (measure(trial.evaluation), trial.evaluation.tpt_ms, number)
        for number, trial in enumerate(row.trials)
    )
    kept: list[tuple[dict[str, float], float, float]] = []
    for cost, tpt_ms, number in points:
        if not kept or tpt_ms < kept[-1][1]:
            kept.append((dict(row.trials[number].candidate.settings), tpt_ms, cost))
    return kept


def _fronts(row: Row) -> dict[str, Any]:
    return {"navs": front(row, _navs), "ids": front(row, _ids)}


def _fronts_table(name: str, dataset: str, bound_ms: float, rows: dict[str, Row]) -> Table:
    limits = [("NAVs", _navs, limit) for limit in NAV_LIMITS]
    limits += [("ids", _ids, limit) for limit in ID_LIMITS]
    return Table(
        f"{name}, {dataset}: the lowest TPT in ms at up to so many NAVs, or ids verified, per "
        f"token; a single path of drafts takes {bound_ms:.1f} ms at least",
        ("method", *(f"{limit:g} {unit}" for unit, _, limit in limits), "any"),
        tuple(
            (
                method,
                *(_best(row, measure, limit) for _, measure, limit in limits),
                min(trial.evaluation.tpt_ms for trial in row.trials),
            )
            for method, row in rows.items()
        ),
    )


def _pareto_remarks(checks: Sequence[_Check], missed: Sequence[_Check]) -> list[str]:
    if not checks:
        return []
    remarks = [f"{len(checks) - len(missed)} of {len(checks)} targets are reached."]
    for check in missed:
        found = "no setting is" if check.ratio is None else f"the ratio is {check.ratio:.3f}"
        remarks.append(
            f"Missed: {check.scenario}, {check.dataset}, {check.claim}: {found}, "
            f"where at most {check.most:g} was wanted."
        )
    return remarks
