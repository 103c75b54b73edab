"""Schedules against the golden values of the cost model, all partitions, and a simulated link."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.costs import LinkCosts, Wire
from policies.token_batches import (
    CACHED_PLANS,
    RECENT_NAVS,
    START_TOKENS,
    BatchCosts,
    Window,
    drafts_until_batch,
    immediate,
    lower_bound,
    makespan,
    plan,
    single_upload,
)

LINK = LinkCosts(rtt_ms=50.0, overhead_ms=2.0, ms_per_byte=0.0004)
# whole numbers, so that equal makespans are equal; few, so that there are many ties
whole_costs = st.builds(BatchCosts, *[st.integers(0, 12)] * 4)
any_costs = st.builds(BatchCosts, *[st.floats(0, 1e6)] * 4)
schedules = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple)


def partitions(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """All 2^(num_tokens - 1) schedules."""
    for num_cuts in range(num_tokens):
        for cuts in combinations(range(1, num_tokens), num_cuts):
            bounds = (0, *cuts, num_tokens)
            yield tuple(end - start for start, end in pairwise(bounds))


def simulated_arrival(sizes: tuple[int, ...], costs: BatchCosts) -> int:
    """The last arrival on a link that is simulated millisecond by millisecond; whole costs."""
    waiting = [(costs.draft_ms * end, n) for n, end in zip(sizes, accumulate(sizes), strict=True)]
    busy_until = now = 0
    while waiting:
        ready, size = waiting[0]
        if ready <= now and busy_until <= now:
            waiting.pop(0)
            busy_until = int(now + costs.startup_ms + costs.token_ms * size)
        else:
            now += 1
    return int(busy_until + costs.delay_ms)


@pytest.mark.parametrize(
    ("costs", "num_tokens", "sizes", "makespan_ms"),
    [
        (BatchCosts(36, 25, 116), 20, (1, 1, 4, 14), 2456.0),
        (BatchCosts(36, 25, 0.0048), 20, (1,) * 20, 745.0048),
        (BatchCosts(6, 5, 0.5), 6, (1,) * 6, 41.5),  # not the 24.5 of the notes' §7.8
        (BatchCosts(6, 5, 2), 6, (1, 1, 2, 2), 45.0),
    ],
)
def test_golden_plans(costs, num_tokens, sizes, makespan_ms) -> None:
    assert plan(num_tokens, costs) == sizes
    assert makespan(sizes, costs) == pytest.approx(makespan_ms, rel=1e-12)


def test_golden_values_of_the_other_schedules() -> None:
    costs = BatchCosts(6, 5, 0.5)
    assert makespan(single_upload(6), costs) == 44.0
    assert makespan(immediate(6), costs) == 41.5
    assert lower_bound(6, costs) == 41.5


@settings(deadline=None)
@given(schedules, whole_costs)
def test_the_makespan_is_that_of_a_simulated_link(sizes, costs) -> None:
    assert makespan(sizes, costs) == simulated_arrival(sizes, costs)


@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_the_plan_is_as_good_as_the_best_of_all_partitions(num_tokens: int) -> None:
    for values in [(36, 25, 116), (6, 5, 2), (3, 7, 2), (1, 9, 4), (0, 5, 1), (5, 0, 7), (0, 0, 0)]:
        costs = BatchCosts(*values, delay_ms=11)
        best = min(makespan(sizes, costs) for sizes in partitions(num_tokens))
        assert makespan(plan(num_tokens, costs), costs) == best


@settings(deadline=None)
@given(st.integers(1, 9), any_costs)
def test_no_partition_is_better_whatever_the_costs(num_tokens: int, costs) -> None:
    best = min(makespan(sizes, costs) for sizes in partitions(num_tokens))
    assert makespan(plan(num_tokens, costs), costs) == pytest.approx(best, rel=1e-12)


@settings(deadline=None)
@given(st.integers(1, 9), whole_costs)
def test_of_equal_plans_it_is_the_one_with_the_fewest_messages(num_tokens: int, costs) -> None:
    least = {n: min(makespan(s, costs) for s in partitions(n)) for n in range(1, num_tokens + 1)}
    equal = [
        sizes
        for sizes in partitions(num_tokens)
        if all(
            makespan(sizes[: k + 1], costs) == least[end] for k, end in enumerate(accumulate(sizes))
        )
    ]
    fewest = min(map(len, equal))
    chosen = plan(num_tokens, costs)
    assert chosen in equal
    assert len(chosen) == fewest
    assert chosen[-1] == max(sizes[-1] for sizes in equal if len(sizes) == fewest)


@settings(deadline=None)
@given(st.integers(1, 30), any_costs)
def test_a_plan_cut_short_at_a_batch_is_the_plan_of_its_tokens(num_tokens: int, costs) -> None:
    sizes = plan(num_tokens, costs)
    for k in range(1, len(sizes)):
        assert plan(sum(sizes[:k]), costs) == sizes[:k]


@settings(deadline=None)
@given(st.integers(1, 30), any_costs)
def test_plans_lie_between_the_lower_bound_and_the_simple_schedules(num_tokens, costs) -> None:
    planned_ms = makespan(plan(num_tokens, costs), costs)
    rounding = 1 + 1e-12
    assert lower_bound(num_tokens, costs) <= planned_ms * rounding
    assert planned_ms <= makespan(immediate(num_tokens), costs) * rounding
    assert planned_ms <= makespan(single_upload(num_tokens), costs) * rounding


@settings(deadline=None)
@given(st.integers(1, 30), any_costs, st.floats(0, 1e3))
def test_a_delay_shifts_the_end_and_leaves_the_plan(num_tokens: int, costs, delay_ms) -> None:
    delayed = replace(costs, delay_ms=delay_ms)
    undelayed = replace(costs, delay_ms=0.0)
    sizes = plan(num_tokens, delayed)
    assert sizes == plan(num_tokens, undelayed)
    assert makespan(sizes, delayed) == makespan(sizes, undelayed) + delay_ms


def test_a_dear_start_makes_one_message_and_a_cheap_one_many() -> None:
    assert plan(20, BatchCosts(36, 1e4, 0.1)) == single_upload(20)
    assert plan(20, BatchCosts(36, 0.0, 30.0)) == immediate(20)
    assert plan(20, BatchCosts(36, 25, 0.0)) == single_upload(20)  # no later, and 19 messages less


def test_costs_of_any_size_are_planned_for() -> None:
    assert sum(plan(20, BatchCosts(1e308, 1e308, 1e308))) == 20


def test_a_link_is_occupied_by_the_way_only_if_requests_follow_each_other() -> None:
    occupying = BatchCosts.occupying(36.0, LINK, 4.0, 100.0)
    persistent = BatchCosts.persistent(36.0, LINK, 4.0, 100.0)
    assert astuple(occupying) == pytest.approx((36.0, 27.04, 0.0016, 0.0))
    assert astuple(persistent) == pytest.approx((36.0, 2.04, 0.0016, 25.0))


def test_a_measured_overhead_holds_the_way_if_requests_follow_each_other() -> None:
    wire = Wire(4.0, 100.0, one_request_at_a_time=True)
    assert BatchCosts.of(36.0, LINK, wire) == BatchCosts.persistent(36.0, LINK, 4.0, 100.0)
    untimed = replace(LINK, overhead_ms=0.0)
    assert BatchCosts.of(36.0, untimed, wire) == BatchCosts.occupying(36.0, untimed, 4.0, 100.0)


@settings(deadline=None)
@given(st.integers(1, 40))
def test_one_upload_takes_the_same_in_both_models(num_tokens: int) -> None:
    occupying = BatchCosts.occupying(36.0, LINK, 4e5, 100.0)
    persistent = BatchCosts.persistent(36.0, LINK, 4e5, 100.0)
    upload = single_upload(num_tokens)
    assert makespan(upload, occupying) == pytest.approx(makespan(upload, persistent))


def test_costs_that_jitter_do_not_make_the_cache_grow() -> None:
    for n in range(3 * CACHED_PLANS):
        plan(2, BatchCosts(36 + n / 1000, 25, 1))
    assert plan.cache_info().currsize == CACHED_PLANS


# --- batches of a period ---------------------------------------------------------------------


@settings(deadline=None)
@given(schedules, st.integers(1, 3))
def test_batches_leave_at_the_ends_of_the_schedule_period_after_period(sizes, periods) -> None:
    sent, since_batch = [], 0
    for num_drafts in range(sum(sizes) * periods):
        since_batch += 1
        if drafts_until_batch(sizes, num_drafts) == 1:
            sent.append(since_batch)
            since_batch = 0
    assert tuple(sent) == sizes * periods
    assert since_batch == 0


def test_within_a_batch_its_rest_is_missing() -> None:
    assert [drafts_until_batch((1, 3, 2), n) for n in range(8)] == [1, 3, 2, 1, 2, 1, 1, 3]


# --- N̂ ---------------------------------------------------------------------------------------


def test_the_window_starts_at_twenty_or_the_most_allowed() -> None:
    assert START_TOKENS == 20
    assert Window(64).num_tokens == 20
    assert Window(8).num_tokens == 8


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=80), st.integers(1, 30))
def test_the_window_is_the_rounded_mean_of_the_recent_navs(draft_lens, max_window) -> None:
    window = Window(max_window)
    for draft_len in draft_lens:
        window.observe_nav(draft_len)
    recent = draft_lens[-RECENT_NAVS:]
    rounded = int(sum(recent) / len(recent) + 0.5)  # sums of few small numbers: exact
    assert window.num_tokens == min(max(rounded, 1), max_window)


def test_the_window_stands_at_constant_lengths_and_recovers_from_empty_navs() -> None:
    window = Window(64)
    for _ in range(200):
        window.observe_nav(0)
    assert window.num_tokens == 1
    sizes = []
    for _ in range(100):
        window.observe_nav(12)
        sizes.append(window.num_tokens)
    assert sizes == sorted(sizes)
    assert sizes[RECENT_NAVS - 1 :] == [12] * (101 - RECENT_NAVS)


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["draft_ms", "startup_ms", "token_ms", "delay_ms"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_durations_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be a finite number >= 0, got {value}"):
        replace(BatchCosts(1, 1, 1), **{field: value})


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: plan(0, BatchCosts(1, 1, 1)), "num_tokens"),
        (lambda: immediate(0), "num_tokens"),
        (lambda: single_upload(-1), "num_tokens"),
        (lambda: lower_bound(0, BatchCosts(1, 1, 1)), "num_tokens"),
        (lambda: makespan((), BatchCosts(1, 1, 1)), "sizes"),
        (lambda: makespan((2, 0), BatchCosts(1, 1, 1)), "sizes"),
        (lambda: drafts_until_batch((), 0), "sizes"),
        (lambda: drafts_until_batch((2,), -1), "num_drafts"),
        (lambda: BatchCosts.persistent(1, LINK, -4, 0), "bytes_per_token"),
        (lambda: BatchCosts.occupying(1, LINK, 4, float("nan")), "bytes_per_message"),
        (lambda: BatchCosts.persistent(1, LinkCosts(-1.0), 4, 0), "delay_ms"),
        (lambda: Window(0), "max_window"),
        (lambda: Window(8).observe_nav(-1), "draft_len"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(call, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        call()
