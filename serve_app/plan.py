"""`outrider plan`: where each mode would be best around a user's own point, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from policies.crossover import Decision, Mode, Objective, Snapshot, choose, score
from policies.methods import METHODS
from policies.player import Player
from policies.regimes import measured, regime_map
from policies.scenarios import Scenario
from policies.traces import Trace
from serve_app.bench.trials import workloads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERIFY_FACTORS = (0.5, 1.0, 2.0)  # a panel each
CELLS = 40  # along either axis of a panel
COLOURS = {
    Mode.EDGE_ONLY: "#e0a458",
    Mode.CLOUD_ONLY: "#7a9cc6",
    Mode.COLLABORATIVE: "#6fae75",
}
CLOSE = 1.05  # modes that differ by less are one as good as the other
MIN_SHOWN_MS = 0.2  # a logarithmic axis has no 0
METHOD = "outrider"


class PlanError(ValueError):
    """There is nothing to plan from, or nothing to draw with; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Maps:
    """One map of decisions per verify factor, and the point that they are drawn around."""

    snapshot: Snapshot
    objective: Objective
    rtts_ms: tuple[float, ...]
    drafts_ms: tuple[float, ...]
    panels: tuple[list[list[Decision]], ...]  # [factor][draft time][round trip]

    @property
    def here(self) -> Decision:
        """What the point itself calls for."""
        return choose(self.snapshot, self.objective)


def of_scenario(scenario: Scenario, trace: Trace) -> Snapshot:
    """What our method measures in a scenario over the trace's tuning split.

    The edge's own target is the scenario's. Raises PlanError if the split is too short for it.
    """
    player = Player(scenario, METHODS[METHOD])
    for workload in workloads(scenario, trace):
        player.play(workload.pairs(scenario, "tune"), workload.end_ids)
    snapshot = measured(player.learned)
    if snapshot is None:
        raise PlanError("the trace's tuning split is too short to measure the scenario over it")
    return replace(snapshot, edge_target_ms=scenario.edge_target_ms)


def maps(snapshot: Snapshot, objective: Objective = "latency", cells: int = CELLS) -> Maps:
    """Maps around the point, on logarithmic axes that hold it. ValueError as `regime_map`."""
    rtts_ms = _axis(snapshot.link.rtt_ms, 5.0, 500.0, cells)
    drafts_ms = _axis(snapshot.costs.draft_ms, 5.0, 200.0, cells)
    panels = tuple(
        regime_map(snapshot, rtts_ms, drafts_ms, objective, factor) for factor in VERIFY_FACTORS
    )
    return Maps(snapshot, objective, rtts_ms, drafts_ms, panels)


def _axis(point: float, low: float, high: float, cells: int) -> tuple[float, ...]:
    shown = max(point, MIN_SHOWN_MS)
    ends = min(low, shown / 2.0), max(high, shown * 2.0)
    return tuple(np.geomspace(*ends, cells).tolist())


def draw(drawn: Maps, out: Path) -> None:
    """Write the picture, in the format of the file's ending.

    Raises PlanError without matplotlib or for an ending that it does not know, OSError for a file
    that cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("the picture needs matplotlib: pip install 'outrider[plan]'") from error
    figure = Figure(figsize=(4.2 * len(drawn.panels), 4.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    endings = canvas.get_supported_filetypes()
    if out.suffix.lstrip(".").lower() not in endings:
        raise PlanError(f"{out} must end in one of {', '.join(sorted(endings))}")
    axes = figure.subplots(1, len(drawn.panels), sharey=True, squeeze=False)[0]
    for axis, factor, panel in zip(axes, VERIFY_FACTORS, drawn.panels, strict=True):
        _draw_panel(axis, drawn, panel, factor)
    axes[0].set_ylabel("draft token, ms")
    figure.suptitle(_title(drawn))
    figure.legend(handles=_legend(drawn), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(out, dpi=150)


def _draw_panel(axis: Axes, drawn: Maps, panel: list[list[Decision]], factor: float) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import LogLocator, NullLocator

    order = list(COLOURS)
    modes = [[order.index(decision.mode) for decision in row] for row in panel]
    colours = ListedColormap([COLOURS[mode] for mode in order])
    grid = drawn.rtts_ms, drawn.drafts_ms
    axis.pcolormesh(*grid, modes, cmap=colours, vmin=-0.5, vmax=len(order) - 0.5, shading="nearest")
    for mode in _possible(drawn):
        leads = np.array(
            [[lead(decision, mode, drawn.objective) for decision in row] for row in panel]
        )
        if leads.min() < CLOSE < leads.max():
            axis.contour(*grid, leads, levels=[CLOSE], colors="black", linestyles="dashed")
    axis.set_xscale("log")
    axis.set_yscale("log")
    for either in (axis.xaxis, axis.yaxis):
        either.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        either.set_major_formatter("{x:g}")
        either.set_minor_locator(NullLocator())
    axis.set_xlabel("round trip, ms")
    axis.set_title(f"verify {factor * drawn.snapshot.forward_ms(1):.3g} ms")
    if factor == 1.0:
        here = (drawn.snapshot.link.rtt_ms, drawn.snapshot.costs.draft_ms)
        shown = [max(value, MIN_SHOWN_MS) for value in here]
        axis.plot(*shown, "*", color="black", markeredgecolor="white", markersize=18, zorder=3)


def lead(decision: Decision, mode: Mode, objective: Objective) -> float:
    """The best other mode's score over this one's; infinite if no other is possible."""
    scores = {found.mode: score(found, objective) for found in decision.predictions}
    own = scores.pop(mode)
    others = min(scores.values(), default=math.inf)
    return others / own if own > 0.0 else math.inf


def _possible(drawn: Maps) -> list[Mode]:
    possible = {prediction.mode for prediction in drawn.here.predictions}
    return [mode for mode in COLOURS if mode in possible]


def _title(drawn: Maps) -> str:
    snapshot = drawn.snapshot
    rate = snapshot.prefix[0]
    return f"Best mode by {drawn.objective}: {rate:.1%} accepted, {snapshot.draft_len} drafts a NAV"


def _legend(drawn: Maps) -> Sequence[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        *(Patch(color=COLOURS[mode], label=str(mode)) for mode in _possible(drawn)),
        Line2D([], [], color="black", linestyle="dashed", label="5 % better than the next mode"),
        Line2D([], [], color="black", marker="*", linestyle="", markersize=12, label="you"),
    ]


def describe(drawn: Maps) -> str:
    """The point in a line, and what it calls for with the reason."""
    snapshot = drawn.snapshot
    costs, link = snapshot.costs, snapshot.link
    return (
        f"draft {costs.draft_ms:.3g} ms, verify {costs.verify_ms:.3g} ms + "
        f"{costs.verify_ms_per_token:.3g} ms per id, round trip {link.rtt_ms:.3g} ms, "
        f"{snapshot.prefix[0]:.1%} accepted, {snapshot.draft_len} drafts a NAV\n"
        f"{drawn.here.reason}"
    )
