"""`outrider simulate`: every method in one scenario, as a table and a JSON line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from policies.player import Figures
from policies.scenarios import Scenario
from policies.traces import Trace
from serve_app.bench.trials import (
    EDGE_ONLY,
    TUNABLE,
    Row,
    Workload,
    clairvoyant_tpt_ms,
    compare,
    workloads,
)

VANILLA = "vanilla"


def run(name: str, scenario: Scenario, trace: Trace, methods: Sequence[str], as_json: bool) -> None:
    """Print the set-up, a table for each data set, and the JSON line; with `as_json` only that."""
    out = sys.stderr if as_json else sys.stdout
    began_s = time.monotonic()
    rows = compare(scenario, trace, methods)
    sets = workloads(scenario, trace)
    bounds = {workload.dataset: clairvoyant_tpt_ms(scenario, workload) for workload in sets}
    tokens = sum(t.tuning.tokens + t.evaluation.tokens for row in rows for t in row.trials)
    seconds = time.monotonic() - began_s
    print(
        f"scenario {name}: settings chosen on the tuning split, figures of the evaluation split\n"
        f"{tokens} tokens simulated in {seconds:.0f} s",
        file=out,
    )
    result: list[dict[str, Any]] = []
    for workload in sets:
        own = [row for row in rows if row.dataset == workload.dataset]
        entries = _entries(scenario, workload, own)
        print(_table(workload.dataset, bounds[workload.dataset], entries), file=out)
        result += entries
    print(json.dumps({"scenario": name, "clairvoyant_tpt_ms": bounds, "rows": result}))


def _entries(scenario: Scenario, workload: Workload, rows: Sequence[Row]) -> list[dict[str, Any]]:
    vanilla_ms = next((row.best.evaluation.tpt_ms for row in rows if row.name == VANILLA), None)
    entries = [_entry(row, vanilla_ms) for row in rows]
    if scenario.edge_target_ms is not None:
        alone_ms = scenario.edge_target_ms
        entries.append(
            {
                "dataset": workload.dataset,
                "method": EDGE_ONLY,
                "tpt_ms": alone_ms,
                "navs_per_token": 0.0,
                "verified_per_token": 0.0,
                "bytes_up_per_token": 0.0,
                "speedup_vs_vanilla": None if vanilla_ms is None else vanilla_ms / alone_ms,
                "settings": {},
            }
        )
    return entries


def _entry(row: Row, vanilla_ms: float | None) -> dict[str, Any]:
    figures: Figures = row.best.evaluation
    entry: dict[str, Any] = {
        "dataset": row.dataset,
        "method": row.name,
        "tpt_ms": figures.tpt_ms,
        "navs_per_token": figures.navs_per_token,
        "verified_per_token": figures.verified_per_token,
        "bytes_up_per_token": figures.bytes_up_per_token,
        "speedup_vs_vanilla": None if vanilla_ms is None else vanilla_ms / figures.tpt_ms,
        "settings": dict(row.best.candidate.settings),
    }
    if row.name in TUNABLE:
        entry["front"] = [
            [
                dict(trial.candidate.settings),
                trial.evaluation.tpt_ms,
                trial.evaluation.navs_per_token,
            ]
            for trial in row.trials
        ]
    return entry


def _table(dataset: str, bound_ms: float, entries: Sequence[dict[str, Any]]) -> str:
    head = f"\n{dataset}: a single path of drafts takes {bound_ms:.1f} ms per token at least\n"
    head += f"{'method':<20} {'TPT ms':>8} {'NAVs/tok':>9} {'ids/tok':>8} {'B up/tok':>9} "
    lines = [head + f"{'speedup':>8}  settings"]
    for entry in entries:
        speedup = entry["speedup_vs_vanilla"]
        settings = " ".join(f"{key}={value:g}" for key, value in entry["settings"].items())
        lines.append(
            f"{entry['method']:<20} {entry['tpt_ms']:8.1f} {entry['navs_per_token']:9.3f} "
            f"{entry['verified_per_token']:8.2f} {entry['bytes_up_per_token']:9.0f} "
            f"{'-' if speedup is None else format(speedup, '.2f'):>8}  {settings}"
        )
    return "\n".join(lines)
