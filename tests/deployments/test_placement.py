"""Which labels put what where, and which are an error before anything is deployed."""

from __future__ import annotations

import pytest

from deployments.placement import Placement, PlacementError, place

EDGE, CLOUD = {"outrider.io/tier": "edge"}, {"outrider.io/tier": "cloud"}


def test_one_unlabelled_node_gets_everything() -> None:
    assert place([{"ray.io/node-id": "1"}]) == Placement({}, {}, 1)


def test_labelled_nodes_get_their_tier() -> None:
    assert place([CLOUD, EDGE, EDGE, {}]) == Placement(EDGE, CLOUD, 2)


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        ([EDGE], "outrider.io/tier=cloud"),
        ([CLOUD, {}], "outrider.io/tier=edge"),
        ([{}, {}], "outrider.io/tier=edge or outrider.io/tier=cloud"),
        ([{"outrider.io/tier": "fog"}, EDGE, CLOUD], "fog"),
        ([], "outrider.io/tier=edge"),
    ],
)
def test_a_missing_label_is_named(nodes: list[dict[str, str]], named: str) -> None:
    with pytest.raises(PlacementError, match=named):
        place(nodes)
