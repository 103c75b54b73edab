"""The figures of a session and of several (C40), against closed forms and a simulated trace.

Statistical tests have fixed seeds, so they cannot flicker; the stated false-alarm probability is
the chance that right code with other seeds would have failed them.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.events import TokenDrafted, VerdictArrived
from policies.metrics import SessionMetrics
from policies.session import DraftSession, SessionConfig
from policies.trigger import FixedTrigger
from policies.types import Ids, Origin, Verdict, VerdictKind
from tests.policies.test_two_sided import RUNS, run
from tests.policies.toy import flaky, new_session

ONE_NAV = SessionConfig(trigger=FixedTrigger(4), max_window=4)
PIPELINED = dataclasses.replace(ONE_NAV, max_window=12, draft_while_waiting=True)
WINDOW = SessionConfig(
    trigger=FixedTrigger(2), max_window=24, max_navs_in_flight=8, draft_while_waiting=True
)
OFF = SessionConfig(speculate=False)


def assert_near(hits: int, trials: int, rate: float) -> None:
    """Within 5.5 standard errors: a false-alarm probability below 1e-7, by the normal tail."""
    assert abs(hits - trials * rate) <= 5.5 * math.sqrt(trials * rate * (1 - rate))


# --- one session -----------------------------------------------------------------------------


def test_each_origin_counts_where_it_belongs() -> None:
    metrics = SessionMetrics(drafted=4, started_ms=10.0)
    for index, origin in enumerate([Origin.ACCEPTED, Origin.ACCEPTED, Origin.RECOVERED]):
        metrics.count(origin, index, 20.0 + index)
    metrics.count(Origin.BONUS, None, 30.0)
    assert (metrics.accepted_at, metrics.judged_at) == ([1, 1, 0], [1, 1, 1])
    assert (metrics.accepted, metrics.recovered, metrics.bonus) == (2, 1, 1)
    assert (metrics.acceptance_rate, metrics.ttft_ms, metrics.tpt_ms) == (0.5, 10.0, 5.0)


def test_nothing_generated_has_no_rates() -> None:
    empty = SessionMetrics()
    rates = (empty.acceptance_rate, empty.acceptance_len, empty.ttft_ms, empty.tpt_ms)
    assert rates == (None,) * 4


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_with_one_nav_at_a_time_the_places_follow_from_the_drafts(acceptance: float) -> None:
    """40 tokens in NAVs of 4 drafts: all stand and a bonus follows, or the first one falls."""
    outcome, _ = run(1, ONE_NAV, flaky(), acceptance=acceptance)
    if acceptance:
        assert outcome.metrics.accepted_at == outcome.metrics.judged_at == [8, 8, 8, 8]
    else:  # the last token is asked for without a draft
        assert (outcome.metrics.accepted_at, outcome.metrics.judged_at) == ([0], [39])


def test_the_target_alone_judges_no_draft() -> None:
    outcome, _ = run(1, OFF, flaky())
    assert (outcome.metrics.accepted_at, outcome.metrics.judged_at) == ([], [])
    assert outcome.metrics.bonus == 40


def drafting(drafts: Ids) -> DraftSession:
    """An acknowledged session whose NAVs of 2 drafts are all on their way."""
    session = new_session((3, 1, 4), max_tokens=20, config=WINDOW)
    session.start(0.0)
    session.handle(VerdictArrived(Verdict("s", 0, 3, VerdictKind.ACCEPTED), 0.0))
    for position, draft_id in enumerate(drafts, 3):
        session.handle(TokenDrafted(0, position, draft_id, 0.9, 0.0))
    return session


def bonus(start: int, accepted: int, next_id: int) -> VerdictArrived:
    return VerdictArrived(Verdict("s", 0, start, VerdictKind.BONUS, accepted, next_id), 1.0)


def test_a_draft_that_equals_the_next_id_counts_as_the_first_of_its_own_nav_and_once() -> None:
    session = drafting((5, 6, 7, 8))
    session.handle(bonus(3, 2, 7))
    assert (session.metrics.accepted_at, session.metrics.judged_at) == ([2, 1], [2, 1])
    session.handle(bonus(5, 2, 9))
    assert (session.metrics.accepted_at, session.metrics.judged_at) == ([2, 2], [2, 2])


def test_a_draft_that_the_next_id_refutes_counts_as_judged_and_not_accepted() -> None:
    """Else only the first drafts that stand are counted, and their rate comes out too high."""
    session = drafting((5, 6, 7, 8))
    session.handle(bonus(3, 2, 9))
    assert session.metrics.rollbacks == 1
    assert (session.metrics.accepted_at, session.metrics.judged_at) == ([1, 1], [2, 1])


def test_repeated_and_overlapping_verdicts_count_a_draft_once() -> None:
    session = drafting((5, 6, 7, 8))
    for verdict in (bonus(3, 2, 7), bonus(3, 2, 7), bonus(3, 4, 9), bonus(5, 2, 9)):
        session.handle(verdict)
    assert (session.metrics.accepted, sum(session.metrics.judged_at)) == (4, 4)


@settings(max_examples=100, deadline=None)
@given(
    **RUNS,
)
def test_places_add_up_whatever_the_link_does(
    seed: int, config: SessionConfig, **faults: Any
) -> None:
    """Judged = accepted + refuted. A rejection that also ends the text rolls nothing back."""
    metrics = run(seed, config, **faults)[0].metrics
    assert sum(metrics.accepted_at) == metrics.accepted <= metrics.drafted
    assert 0 <= sum(metrics.judged_at) - metrics.accepted - metrics.rollbacks <= 1
    pairs = zip_longest(metrics.accepted_at, metrics.judged_at, fillvalue=0)
    assert all(accepted <= judged for accepted, judged in pairs)
    assert len(metrics.judged_at) <= config.max_window


@pytest.mark.parametrize("config", [ONE_NAV, PIPELINED, WINDOW], ids=["one", "pipe", "window"])
@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_independent_drafts_are_accepted_at_their_rate_at_every_place(
    config: SessionConfig, rate: float
) -> None:
    """False-alarm probability below 1e-6 for each case, of at most 8 places."""
    runs = (run(seed, config, flaky(20), acceptance=rate)[0].metrics for seed in range(150))
    total = SessionMetrics.total(runs)
    often = [
        pair for pair in zip(total.accepted_at, total.judged_at, strict=False) if pair[1] > 200
    ]
    assert 2 <= len(often) <= 8
    for accepted, judged in often:
        assert_near(accepted, judged, rate)


# --- several sessions ------------------------------------------------------------------------


def some_metrics() -> st.SearchStrategy[SessionMetrics]:
    numbers = st.integers(0, 1000)
    places = st.lists(numbers, max_size=5)
    by_type = {"int": numbers, "float": numbers.map(float), "list[int]": places}
    fields = {
        field.name: by_type.get(str(field.type), st.none())
        for field in dataclasses.fields(SessionMetrics)
    }
    return st.builds(SessionMetrics, **fields)


NO_SUMS = {"started_ms", "first_token_ms", "last_token_ms", "accepted_at", "judged_at"}


@given(st.lists(some_metrics(), max_size=4))
def test_every_figure_of_a_total_is_the_sum(runs: list[SessionMetrics]) -> None:
    """Over the dataclass's fields, so that a new counter cannot be forgotten."""
    total = SessionMetrics.total(runs)
    for field in dataclasses.fields(SessionMetrics):
        if field.name not in NO_SUMS:
            assert getattr(total, field.name) == sum(getattr(run, field.name) for run in runs)
    for name in ("accepted_at", "judged_at"):
        columns = zip_longest(*(getattr(run, name) for run in runs), fillvalue=0)
        assert getattr(total, name) == [sum(column) for column in columns]
    assert total.acceptance_rate is None or 0 <= total.accepted <= total.committed


def timed(started_ms: float, first_ms: float | None, last_ms: float | None, tokens: int):  # type: ignore[no-untyped-def]
    return SessionMetrics(
        bonus=tokens, started_ms=started_ms, first_token_ms=first_ms, last_token_ms=last_ms
    )


def test_a_total_has_the_earliest_first_token_and_the_ratio_of_the_sums() -> None:
    """A mean of the two tpt would be (10 + 50) / 2 = 30; sessions start at times of their own."""
    runs = [timed(1_000, 1_040, 1_100, 10), timed(5_000, 5_030, 5_100, 2), timed(9, None, None, 0)]
    for order in (runs, runs[::-1]):
        total = SessionMetrics.total(order)
        assert total.ttft_ms == 30.0
        assert total.tpt_ms == pytest.approx(200 / 12)
    nested = SessionMetrics.total([SessionMetrics.total(runs[:2]), runs[2]])
    assert (nested.ttft_ms, nested.tpt_ms) == (30.0, pytest.approx(200 / 12))


@pytest.mark.parametrize("last_first", [False, True])
def test_a_first_token_after_no_time_is_the_earliest_in_any_order(last_first: bool) -> None:
    runs = [timed(7.0, 7.0, 9.0, 2), timed(7.0, 12.0, 13.0, 2)]
    assert SessionMetrics.total(runs[::-1] if last_first else runs).ttft_ms == 0.0


def test_the_total_of_nothing_has_no_rates_and_a_total_shares_nothing_with_its_parts() -> None:
    assert SessionMetrics.total([]) == SessionMetrics()
    part = SessionMetrics(accepted_at=[1], judged_at=[1])
    total = SessionMetrics.total([part])
    total.count(Origin.ACCEPTED, 0, 1.0)
    assert (part.accepted_at, SessionMetrics().accepted_at) == ([1], [])
