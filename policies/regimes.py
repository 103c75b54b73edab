"""Where each mode of `crossover` is best: the surroundings as measured, and a map around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.controller import Learned
from policies.crossover import Decision, Objective, Snapshot, choose


def measured(learned: Learned) -> Snapshot | None:
    """What the sessions of an edge node have measured of their surroundings.

    The acceptance rate stands for the whole curve, the mean draft length of the latest NAVs for
    all. The edge's own target is nothing that they could measure. None before there are enough
    measurements of each kind, which a method that never drafts will not make.
    """
    environment, rate = learned.monitor.snapshot(), learned.counts.acceptance_rate
    if environment is None or rate is None:
        return None
    method = learned.method
    draft_len = learned.window.num_tokens
    navs = method.max_navs_in_flight if method.draft_while_waiting else 1
    return Snapshot(
        environment.costs,
        environment.link,
        (rate,),
        draft_len,
        min(navs, max(1, method.max_window // draft_len)),
        learned.wire.num_bytes(draft_len),
    )


def moved(snapshot: Snapshot, rtt_ms: float, draft_ms: float, verify_factor: float) -> Snapshot:
    """The same pair elsewhere: another delay, another edge device, a slower or faster verifier.

    A target on the edge device slows down with the draft model there. How long drafts are and how
    often they stand stays as it was. Raises ValueError as `Snapshot` does, and for a `draft_ms` of
    0 in the snapshot, which nothing else is a multiple of.
    """
    costs, edge_target_ms = snapshot.costs, snapshot.edge_target_ms
    if not costs.draft_ms > 0.0:
        raise ValueError(f"draft_ms must be > 0, got {costs.draft_ms}")
    if edge_target_ms is not None:
        edge_target_ms *= draft_ms / costs.draft_ms
    return replace(
        snapshot,
        costs=replace(
            costs,
            draft_ms=draft_ms,
            verify_ms=verify_factor * costs.verify_ms,
            verify_ms_per_token=verify_factor * costs.verify_ms_per_token,
        ),
        link=replace(snapshot.link, rtt_ms=rtt_ms),
        edge_target_ms=edge_target_ms,
    )


def regime_map(
    snapshot: Snapshot,
    rtts_ms: Sequence[float],
    drafts_ms: Sequence[float],
    objective: Objective,
    verify_factor: float = 1.0,
) -> list[list[Decision]]:
    """What `choose` decides, [draft time][round trip]; ValueError as it and `moved`."""
    return [
        [choose(moved(snapshot, rtt_ms, draft_ms, verify_factor), objective) for rtt_ms in rtts_ms]
        for draft_ms in drafts_ms
    ]
