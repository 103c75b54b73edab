"""The studies behind `docs/evidence.md`: each a command that prints its tables and a JSON line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from policies.traces import Trace
from serve_app.bench.studies.report import Report

# by name: the module's function of the same name, with _ for -
STUDIES: Mapping[str, str] = {
    "pareto": "ours",
    "crossover": "modes",
    "specstop-transition": "specstop",
    "specstop-strategies": "specstop_strategies",
    "specstop-regret": "specstop_regret",
    "specstop-information": "specstop_information",
    "pipesd-table1": "pipesd",
    "pipesd-table1-paper-sized": "pipesd",
    "pipesd-table1-ids": "pipesd",
    "pipesd-bandwidth": "pipesd",
    "pipesd-ablation": "pipesd_parts",
    "pipesd-diagnostics": "pipesd_parts",
    "pipesd-search": "pipesd_search",
    "pipesd-overhead": "pipesd_overhead",
    "pipesd-clients": "pipesd_clients",
    "pipesd-dynamic": "pipesd_dynamic",
}


def study(name: str) -> Callable[[Trace], Report]:
    """The study of that name. Raises KeyError."""
    found: Callable[[Trace], Report] = getattr(
        import_module(f"serve_app.bench.studies.{STUDIES[name]}"), name.replace("-", "_")
    )
    return found
