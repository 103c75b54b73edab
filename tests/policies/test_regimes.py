"""What a node has measured as a point on the map of modes, and the map around it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.controller import Learned
from policies.costs import Costs, LinkCosts
from policies.crossover import Mode, Snapshot, choose
from policies.methods import METHODS
from policies.player import Player
from policies.regimes import measured, moved, regime_map
from policies.replay import ReplayPair
from policies.scenarios import edge
from tests.policies.traces import toy_trace

HERE = Snapshot(Costs(10.0, 30.0, 0.5), LinkCosts(50.0), (0.9,), 4, 8, edge_target_ms=23.0)


def test_nothing_is_measured_before_anything_was_drafted() -> None:
    assert measured(Learned(METHODS["outrider"])) is None


@pytest.mark.parametrize("name", ["outrider", "vanilla"])
def test_what_a_scenario_is_made_of_is_measured(name: str) -> None:
    player = Player(edge(12.0, 80.0, 25.0), METHODS[name])
    trace = toy_trace(prompts=8, length=48)
    player.play([ReplayPair(prompt) for prompt in trace.of("toy", "tune")], trace.end_ids)
    found = measured(player.learned)
    assert found is not None
    assert found.costs.draft_ms == pytest.approx(12.0)
    assert found.forward_ms(1) == pytest.approx(25.0)
    bytes_ms = found.nav_bytes * found.link.ms_per_byte
    sent_ms = found.nav_bytes / 2500.0  # at 20 Mbit/s
    assert found.link.rtt_ms + bytes_ms == pytest.approx(80.0 + sent_ms, abs=0.05)
    own = player.learned.counts.acceptance_rate
    assert found.prefix == (own,)
    method = METHODS[name]
    assert found.draft_len * found.max_navs_in_flight <= method.max_window
    assert (found.max_navs_in_flight == 1) == (name == "vanilla")


def test_elsewhere_only_the_named_times_differ() -> None:
    there = moved(HERE, 200.0, 40.0, 2.0)
    assert there.costs == Costs(40.0, 60.0, 1.0)
    assert there.link == LinkCosts(200.0)
    assert there.edge_target_ms == pytest.approx(92.0)
    assert moved(HERE, 50.0, 10.0, 1.0) == HERE
    assert replace(there, costs=HERE.costs, link=HERE.link, edge_target_ms=23.0) == HERE


def test_a_device_without_a_draft_time_cannot_be_scaled() -> None:
    with pytest.raises(ValueError, match="draft_ms"):
        moved(replace(HERE, costs=Costs(0.0, 30.0)), 50.0, 10.0, 1.0)


def test_the_map_is_choose_at_each_of_its_places() -> None:
    rtts_ms, drafts_ms = (5.0, 400.0), (5.0, 36.0, 150.0)
    found = regime_map(HERE, rtts_ms, drafts_ms, "latency", 2.0)
    for row, draft_ms in zip(found, drafts_ms, strict=True):
        for decision, rtt_ms in zip(row, rtts_ms, strict=True):
            assert decision == choose(moved(HERE, rtt_ms, draft_ms, 2.0), "latency")
    assert {decision.mode for row in found for decision in row} == set(Mode)
