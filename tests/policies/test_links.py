"""Links of the simulator: what occupies them, and what changes with time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.links import Direction, LinkModel, Phase, markov_phases


def direction(*phases: Phase, **fields: object) -> Direction:
    return Direction(LinkModel(phases, **fields), np.random.default_rng(0))  # type: ignore[arg-type]


def test_delay_pipelines_and_bytes_do_not() -> None:
    link = direction(Phase(one_way_ms=100.0, bytes_per_ms=10.0), overhead_ms=1.0)
    assert link.send(0.0, 40) == [105.0]
    assert link.send(0.0, 40) == [110.0]
    assert link.send(50.0, 0) == [151.0]


def test_one_request_at_a_time_waits_for_the_arrival() -> None:
    link = direction(Phase(one_way_ms=100.0, bytes_per_ms=10.0), one_request_at_a_time=True)
    assert link.send(0.0, 40) == [104.0]
    assert link.send(0.0, 40) == [208.0]


def test_phases_come_again() -> None:
    link = direction(Phase(10.0, lasts_ms=100.0), Phase(50.0, lasts_ms=20.0))
    delays = [(link.send(at, 0)[0] - at) for at in (0.0, 99.0, 100.0, 119.0, 120.0, 221.0, 240.0)]
    # on a connection in order, what left in the slow phase arrives first
    assert delays == [10.0, 10.0, 50.0, 50.0, 49.0, 50.0, 31.0]


def test_an_outage_holds_back_what_is_sent_in_it() -> None:
    link = direction(Phase(10.0, lasts_ms=100.0), Phase(down=True, lasts_ms=400.0))
    assert link.send(99.0, 0) == [109.0]
    assert link.send(150.0, 0) == [510.0]


def test_jitter_reorders_only_where_order_is_not_kept() -> None:
    phase = Phase(10.0, jitter_ms=50.0)
    for in_order in (True, False):
        link = direction(phase, in_order=in_order)
        arrivals = [link.send(float(at), 0)[0] for at in range(200)]
        assert (arrivals == sorted(arrivals)) == in_order


def test_loss_and_duplication_are_as_likely_as_told() -> None:
    """10,000 messages: 6 standard errors around the mean, false alarm below 1 in 10^8."""
    link = direction(Phase(), loss=0.2, duplication=0.3)
    copies = [len(link.send(float(at), 0)) for at in range(10_000)]
    lost, twice = copies.count(0) / 10_000, copies.count(2) / (10_000 - copies.count(0))
    assert abs(lost - 0.2) < 6 * math.sqrt(0.2 * 0.8 / 10_000)
    assert abs(twice - 0.3) < 6 * math.sqrt(0.3 * 0.7 / 8_000)


def test_a_markov_link_stays_as_long_as_told() -> None:
    """Mean of about 1,000 exponential stays: 6 standard errors, false alarm below 1 in 10^8."""
    states = [Phase(10.0), Phase(90.0)]
    phases = markov_phases(states, 100.0, 100_000.0, np.random.default_rng(3))
    assert [phase.one_way_ms for phase in phases[:4]] == [10.0, 90.0, 10.0, 90.0]
    mean_ms = sum(phase.lasts_ms for phase in phases) / len(phases)
    assert abs(mean_ms - 100.0) < 6 * 100.0 / math.sqrt(len(phases))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Phase(one_way_ms=-1.0), "one_way_ms"),
        (lambda: Phase(jitter_ms=math.nan), "jitter_ms"),
        (lambda: Phase(bytes_per_ms=0.0), "bytes_per_ms"),
        (lambda: Phase(lasts_ms=0.0), "lasts_ms"),
        (lambda: LinkModel(()), "phases"),
        (lambda: LinkModel((Phase(down=True),)), "phases"),
        (lambda: LinkModel(loss=1.0), "loss"),
        (lambda: LinkModel(overhead_ms=math.inf), "overhead_ms"),
        (lambda: markov_phases([Phase()], 1.0, 1.0, np.random.default_rng(0)), "states"),
    ],
)
def test_what_is_out_of_range_is_refused(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]
