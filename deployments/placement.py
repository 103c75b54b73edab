"""Where the graph's deployments go: by node label, decided before anything is deployed.

Serve waits for ever, and does not say why, when no node carries the label that a deployment asks
for; so labels are checked here first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TIER_LABEL = "outrider.io/tier"
EDGE, CLOUD = "edge", "cloud"


class PlacementError(RuntimeError):
    """The cluster's labels leave a deployment without a node."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Label selectors (empty: any node), and the number of edge nodes."""

    edge_selector: dict[str, str] = field(default_factory=dict)
    cloud_selector: dict[str, str] = field(default_factory=dict)
    num_edge_nodes: int = 1


def place(nodes: Sequence[Mapping[str, str]]) -> Placement:
    """The placement for live nodes with these labels.

    Nodes labelled `outrider.io/tier` get their tier's deployments; a single node without the label
    gets everything. Raises PlacementError naming what is missing otherwise.
    """
    tiers = [labels.get(TIER_LABEL) for labels in nodes]
    if len(tiers) == 1 and tiers[0] is None:
        return Placement()
    unknown = sorted({tier for tier in tiers if tier not in (None, EDGE, CLOUD)})
    if unknown:
        raise PlacementError(
            f"{TIER_LABEL} must be {EDGE} or {CLOUD}, but nodes say {', '.join(unknown)}"
        )
    missing = [f"{TIER_LABEL}={tier}" for tier in (EDGE, CLOUD) if tier not in tiers]
    if missing:
        raise PlacementError(
            f"no live node among {len(tiers)} has the label {' or '.join(missing)}; "
            f"start one with: ray start … --labels={missing[0]}"
        )
    return Placement({TIER_LABEL: EDGE}, {TIER_LABEL: CLOUD}, tiers.count(EDGE))
