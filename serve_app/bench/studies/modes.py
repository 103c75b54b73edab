"""How good `crossover`'s choice of a mode is, predicted and in use, over a grid of scenarios."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from policies.costs import Costs, LinkCosts
from policies.crossover import Mode, Snapshot, choose
from policies.methods import METHODS
from policies.mode import ENOUGH_JUDGED, PROBE_EVERY, PROBE_TOKENS
from policies.player import Player
from policies.regimes import measured
from policies.scenarios import edge
from policies.traces import Trace
from serve_app.bench.studies.report import Report, Table
from serve_app.bench.trials import Workload

RTTS_MS = (5.0, 50.0, 150.0, 300.0)
DRAFTS_MS = (10.0, 36.0, 72.0)
VERIFIES_MS = (20.0, 30.0, 60.0, 120.0)
MOST_REGRET = 1.05
PLAYED = {Mode.CLOUD_ONLY: "cloud-only", Mode.COLLABORATIVE: "outrider"}


@dataclass(frozen=True, slots=True)
class Spot:
    """One scenario of the grid on one data set: what the modes took, and what was chosen.

    A regret is a TPT over that of the best mode: of all three, or of the two `in_cloud` that do
    without a target on the edge device, which are those that `auto` has.
    """

    dataset: str
    rtt_ms: float
    draft_ms: float
    verify_ms: float
    taken_ms: dict[Mode, float]
    predicted: Mode
    predicted_in_cloud: Mode
    auto_ms: float
    auto_mode: Mode | None  # in the end; None: it never decided

    @property
    def regret(self) -> float:
        return self.taken_ms[self.predicted] / min(self.taken_ms.values())

    @property
    def regret_in_cloud(self) -> float:
        return self.taken_ms[self.predicted_in_cloud] / self._best_in_cloud_ms

    @property
    def auto_regret(self) -> float:
        return self.auto_ms / self._best_in_cloud_ms

    @property
    def best_in_cloud(self) -> Mode:
        return min(PLAYED, key=lambda mode: self.taken_ms[mode])

    @property
    def _best_in_cloud_ms(self) -> float:
        return self.taken_ms[self.best_in_cloud]


CHOICES: dict[str, Callable[[Spot], float]] = {
    "predicted, of three modes": lambda spot: spot.regret,
    "predicted, of two": lambda spot: spot.regret_in_cloud,
    "auto, of two": lambda spot: spot.auto_regret,
    "always cloud-only, of two": lambda spot: _fixed_regret(spot, Mode.CLOUD_ONLY),
    "always collaborative, of two": lambda spot: _fixed_regret(spot, Mode.COLLABORATIVE),
}


def crossover(
    trace: Trace,
    rtts_ms: Sequence[float] = RTTS_MS,
    drafts_ms: Sequence[float] = DRAFTS_MS,
    verifies_ms: Sequence[float] = VERIFIES_MS,
) -> Report:
    """How much worse than the best mode the predicted one is, and what `auto` makes of it."""
    grid = list(product(trace.datasets, rtts_ms, drafts_ms, verifies_ms))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        spots = list(pool.map(partial(_spot, trace), grid, chunksize=4))
    return Report(
        "crossover",
        "Ours: edge-only, cloud-only or collaborative",
        f"Round trips {_listed(rtts_ms)} × draft tokens {_listed(drafts_ms)} × forwards "
        f"{_listed(verifies_ms)} ms; TPT on the evaluation split, edge-only by the scenario. "
        "Predicted from the scenario's own times and what drafting was like on the tuning split, "
        "its acceptance rate and draft length. `auto` has learned on the tuning split; it has no "
        "target on the edge.",
        (_regret_table(spots), _spots_table(spots)),
        _remarks(spots),
        {
            "spots": [_spot_figures(spot) for spot in spots],
            "regret": {
                name: {"median": median(values), "worst": max(values)}
                for name, values in _regrets(spots).items()
            },
        },
    )


def _listed(values: Sequence[float]) -> str:
    return "{" + ", ".join(f"{value:g}" for value in values) + "}"


def _spot(trace: Trace, at: tuple[str, float, float, float]) -> Spot:
    dataset, rtt_ms, draft_ms, verify_ms = at
    scenario, workload = edge(draft_ms, rtt_ms, verify_ms), Workload(dataset, trace)
    assert scenario.edge_target_ms is not None
    players = {name: Player(scenario, METHODS[name]) for name in (*PLAYED.values(), "auto")}
    for player in players.values():
        player.play(workload.pairs(scenario, "tune"), workload.end_ids)
    known = measured(players[PLAYED[Mode.COLLABORATIVE]].learned)
    assert known is not None, "the tuning split is too short to measure anything over"
    (phase,) = scenario.uplink.phases
    snapshot = replace(
        known,
        costs=Costs(draft_ms, scenario.verify.verify_ms, scenario.verify.verify_ms_per_token),
        link=LinkCosts(rtt_ms, ms_per_byte=1.0 / phase.bytes_per_ms),
        edge_target_ms=scenario.edge_target_ms,
    )
    taken_ms = {
        name: player.play(workload.pairs(scenario, "evaluate"), workload.end_ids).tpt_ms
        for name, player in players.items()
    }
    modes = players["auto"].learned.modes
    assert modes is not None
    return Spot(
        *at,
        taken_ms={mode: taken_ms[name] for mode, name in PLAYED.items()}
        | {Mode.EDGE_ONLY: scenario.edge_target_ms},
        predicted=_predicted(snapshot),
        predicted_in_cloud=_predicted(replace(snapshot, edge_target_ms=None)),
        auto_ms=taken_ms["auto"],
        auto_mode=None if modes.decision is None else modes.decision.mode,
    )


def _predicted(snapshot: Snapshot) -> Mode:
    return choose(snapshot, "latency").mode


def _fixed_regret(spot: Spot, mode: Mode) -> float:
    return spot.taken_ms[mode] / spot.taken_ms[spot.best_in_cloud]


def _regrets(spots: Sequence[Spot]) -> dict[str, list[float]]:
    return {name: [regret(spot) for spot in spots] for name, regret in CHOICES.items()}


def _regret_table(spots: Sequence[Spot]) -> Table:
    return Table(
        f"TPT over that of the best mode; at most {MOST_REGRET:g} is wanted",
        ("choice", "median", "worst", f"over {MOST_REGRET:g}", "of"),
        tuple(
            (
                name,
                median(values),
                max(values),
                sum(value > MOST_REGRET for value in values),
                len(values),
            )
            for name, values in _regrets(spots).items()
        ),
    )


def _spots_table(spots: Sequence[Spot]) -> Table:
    columns = ("data set", "RTT", "draft", "verify", *map(str, PLAYED), str(Mode.EDGE_ONLY))
    return Table(
        "TPT in ms of each mode, the modes chosen, and what `auto` took",
        (*columns, "predicted", "regret", "predicted, of two", "auto", "auto's mode", "its regret"),
        tuple(
            (
                spot.dataset,
                spot.rtt_ms,
                spot.draft_ms,
                spot.verify_ms,
                *(spot.taken_ms[mode] for mode in PLAYED),
                spot.taken_ms[Mode.EDGE_ONLY],
                str(spot.predicted),
                spot.regret,
                str(spot.predicted_in_cloud),
                spot.auto_ms,
                None if spot.auto_mode is None else str(spot.auto_mode),
                spot.auto_regret,
            )
            for spot in spots
        ),
    )


def _remarks(spots: Sequence[Spot]) -> list[str]:
    remarks = []
    for name in ("predicted, of three modes", "predicted, of two", "auto, of two"):
        regret = CHOICES[name]
        worst = max(spots, key=regret)
        over = sum(regret(spot) > MOST_REGRET for spot in spots)
        verdict = "The target is reached" if not over else f"The target is missed in {over} places"
        remarks.append(
            f"{verdict} by what is {name}: at worst {regret(worst):.3f}, with a round trip of "
            f"{worst.rtt_ms:g}, a draft token of {worst.draft_ms:g} and a forward of "
            f"{worst.verify_ms:g} ms on {worst.dataset}."
        )
    missed = [spot for spot in spots if spot.auto_regret > MOST_REGRET]
    wrong = sum(spot.auto_mode is not spot.best_in_cloud for spot in missed)
    if missed:
        remarks.append(
            f"In {wrong} of the {len(missed)} places that `auto` misses it ends in the worse mode. "
            f"It first decides after {ENOUGH_JUDGED} judged drafts, a few answers, so some hard "
            "ones may mislead it, and measures the mode that it left again only after "
            f"{PROBE_EVERY} tokens, for {PROBE_TOKENS[Mode.COLLABORATIVE]} if that is drafting."
        )
    return remarks


def _spot_figures(spot: Spot) -> dict[str, Any]:
    return {
        "dataset": spot.dataset,
        "rtt_ms": spot.rtt_ms,
        "draft_ms": spot.draft_ms,
        "verify_ms": spot.verify_ms,
        "tpt_ms": {str(mode): ms for mode, ms in spot.taken_ms.items()},
        "predicted": str(spot.predicted),
        "predicted_in_cloud": str(spot.predicted_in_cloud),
        "auto_tpt_ms": spot.auto_ms,
        "auto_mode": None if spot.auto_mode is None else str(spot.auto_mode),
        "regret": spot.regret,
        "regret_in_cloud": spot.regret_in_cloud,
        "auto_regret": spot.auto_regret,
    }
