"""What a session tells its control: what was timed is what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest

from policies.control import (
    Answered,
    Committed,
    DecodedOn,
    Drafted,
    Interrupted,
    Judged,
    NavSent,
    Observation,
    Plan,
    RoundEnded,
)
from policies.costs import Costs
from policies.rounds import Rounds
from policies.session import SessionConfig
from policies.simulate import Death, Outcome, simulate
from policies.trigger import FixedTrigger
from policies.types import Ids, Verdict, VerdictKind
from tests.policies.toy import (
    FunctionPair,
    flaky,
    new_session,
    new_verifier,
    target_alone,
    toy_draft,
    toy_target,
)

PROMPT: Ids = (3, 1, 4, 1, 5)
T = TypeVar("T")


@dataclass
class Recorder:
    """A control that goes by the plans given, in turn, and remembers what it was told."""

    plans: list[Plan]
    asked: int = 0
    seen: list[Observation] = field(default_factory=list)

    def plan(self) -> Plan:
        self.asked += 1
        return self.plans[(self.asked - 1) % len(self.plans)]

    def observe(self, observation: Observation) -> None:
        self.seen.append(observation)

    def of(self, kind: type[T]) -> list[T]:
        return [seen for seen in self.seen if isinstance(seen, kind)]


def run(
    control: Recorder,
    config: SessionConfig | None = None,
    deaths: tuple[Death, ...] = (),
    acceptance: float = 0.8,
) -> Outcome:
    rng = np.random.default_rng(4)
    agreement = rng.random(1_000) < acceptance
    target = toy_target(4)
    outcome = simulate(
        new_session(
            PROMPT, max_tokens=60, config=config or SessionConfig(max_window=16), control=control
        ),
        PROMPT,
        verifier=new_verifier,
        pair=FunctionPair(target, toy_draft(target, lambda position: bool(agreement[position]))),
        link=flaky(one_way_ms=20.0),
        costs=Costs(draft_ms=10.0, verify_ms=30.0, verify_ms_per_token=2.0),
        rng=rng,
        deaths=deaths,
    )
    assert outcome.ids == target_alone(target, PROMPT, 60)
    return outcome


def test_a_round_lasts_from_its_first_draft_to_its_verdict() -> None:
    """k drafts, both ways, and a forward over k + 1 ids: the paper's N_t, exactly."""
    control = Recorder([Plan(FixedTrigger(k)) for k in (1, 3, 5)])
    outcome = run(control)
    rounds = control.of(RoundEnded)
    assert len(rounds) >= outcome.metrics.navs - 2  # not the first, which waits for Open
    for ended in rounds:
        k = ended.draft_len
        assert ended.ms == pytest.approx(10.0 * k + 40.0 + 30.0 + 2.0 * (k + 1))
        assert 1 <= ended.committed <= k + 1


def test_an_answer_is_timed_from_its_nav_and_tells_how_many_stand() -> None:
    control = Recorder([Plan(FixedTrigger(4))])
    outcome = run(control)
    answers = control.of(Answered)
    # the first is sent before the session is open, and the last one ends it
    assert len(answers) == outcome.metrics.navs - 2
    for answer in answers:
        assert answer.ms - answer.verify_ms == pytest.approx(40.0)
        assert answer.forward_ids == answer.draft_len + 1
        assert 0 <= answer.accepted <= answer.draft_len <= 4
    accepted = sum(answer.accepted for answer in answers)
    assert accepted <= outcome.metrics.accepted <= accepted + 2 * 4


def test_judged_drafts_and_committed_tokens_add_up() -> None:
    control = Recorder([Plan(FixedTrigger(4))])
    metrics = run(control).metrics
    judged = control.of(Judged)
    assert len(judged) == sum(metrics.judged_at)
    assert sum(one.accepted for one in judged) == sum(metrics.accepted_at)
    assert all(one.accepted == (one.draft.confidence == 0.9) for one in judged)
    assert sum(one.count for one in control.of(Committed)) == 60
    assert len(control.of(NavSent)) == metrics.navs
    assert all(one.ms == pytest.approx(10.0) for one in control.of(Drafted))


def test_with_a_window_each_nav_is_timed_by_itself() -> None:
    config = SessionConfig(
        trigger=FixedTrigger(2), max_window=16, max_navs_in_flight=8, draft_while_waiting=True
    )
    control = Recorder([Plan(FixedTrigger(2))])
    run(control, config, acceptance=1.0)
    told = [answer for answer in control.of(Answered) if answer.verify_ms]
    waits = [answer.ms - answer.verify_ms for answer in told]
    assert any(not answer.alone for answer in told)
    alone = [answer.ms - answer.verify_ms for answer in told if answer.alone]
    assert all(wait == pytest.approx(40.0) for wait in alone)
    assert len(told) > 10
    assert min(waits) >= 40.0
    assert max(waits) < 40.0 + 40.0  # behind at most one forward
    assert all(answer.accepted == answer.draft_len for answer in told)


@pytest.mark.parametrize("noticed", [False, True])
def test_what_waited_for_a_dead_verifier_is_not_timed(noticed: bool) -> None:
    config = SessionConfig(max_window=16, resend_after_ms=500.0)
    control = Recorder([Plan(FixedTrigger(4))])
    outcome = run(control, config, (Death(700.0, noticed),))
    assert outcome.metrics.reopens == 1
    assert all(answer.ms < 100.0 for answer in control.of(Answered))
    assert all(ended.ms < 150.0 for ended in control.of(RoundEnded))


def test_a_plan_to_decode_on_drafts_nothing_and_counts_as_a_round_of_its_own() -> None:
    control = Recorder([Plan(FixedTrigger(1), decode_on=5), Plan(FixedTrigger(3))])
    outcome = run(control)
    lengths = {ended.draft_len for ended in control.of(RoundEnded)}
    assert lengths >= {0, 3}
    assert all(ended.committed == 5 for ended in control.of(RoundEnded) if ended.draft_len == 0)
    assert outcome.metrics.bonus > 20


def test_what_the_verifier_decodes_on_is_told_token_by_token() -> None:
    """All but the first of each stretch, a NAV's own, and the last, which ends the session."""
    control = Recorder([Plan(FixedTrigger(1), decode_on=5)])
    run(control)
    decoded = control.of(DecodedOn)
    assert len(decoded) == 60 - 60 // 5 - 1
    assert all(token.ms == token.verify_ms == pytest.approx(32.0) for token in decoded)


def test_drafts_and_repeats_are_not_told_as_decoded_on() -> None:
    control = Recorder([Plan(FixedTrigger(4))])
    run(control)
    assert control.of(DecodedOn) == []
    rounds = Rounds(control)
    rounds.nav_sent(5, 5, 0, 100.0)
    rounds.answered(Verdict("s", 0, 5, VerdictKind.BONUS, 0, 1, verify_ms=30.0), 180.0)
    rounds.untimed()
    rounds.answered(Verdict("s", 0, 6, VerdictKind.BONUS, 0, 1, verify_ms=30.0), 900.0)
    assert control.of(DecodedOn) == []


def test_nothing_is_drafted_beside_a_verifier_that_decodes_on() -> None:
    """Not even by a session that drafts while it waits."""
    config = SessionConfig(max_window=16, max_navs_in_flight=4, draft_while_waiting=True)
    control = Recorder([Plan(FixedTrigger(1), decode_on=5)])
    outcome = run(control, config)
    assert outcome.metrics.drafted == 0
    assert outcome.metrics.navs == 60 // 5


def test_batches_leave_by_the_plan_and_the_rest_with_the_nav() -> None:
    """Periods of 1 and 2 drafts: of 8, batches of 1, 2, 1, 2, 1 and a NAV of the last."""
    control = Recorder([Plan(FixedTrigger(8), batches=(1, 2))])
    metrics = run(control, acceptance=1.0).metrics
    ends = (1, 3, 4, 6, 7)
    lens = [nav.draft_len for nav in control.of(NavSent)]
    assert lens.count(8) >= 5
    assert metrics.batches == sum(1 + sum(end < length for end in ends) for length in lens)


def test_a_plan_holds_from_the_first_draft_to_its_nav() -> None:
    """A control that changes its mind is asked again only behind the NAV."""
    control = Recorder([Plan(FixedTrigger(k)) for k in (2, 5)])
    rounds = Rounds(control)
    plans = []
    for start, end in ((5, 7), (7, 12), (12, 14)):
        plans.append([rounds.plan(5, float(position)) for position in range(start, end)])
        rounds.nav_sent(start, end, end - start, float(end))
    two, five = control.plans
    assert plans == [[two] * 2, [five] * 5, [two] * 2]
    assert control.asked == 3


@pytest.mark.parametrize("drafting", [True, False])
def test_a_verdict_changes_the_plan_only_if_nothing_is_drafted_by_it_yet(drafting: bool) -> None:
    rounds = Rounds(Recorder([Plan(FixedTrigger(k)) for k in (2, 5, 3)]))
    rounds.plan(5, 0.0)
    rounds.nav_sent(5, 7, 2, 1.0)
    behind = rounds.plan(5, 2.0)
    rounds.settled(8, drafting, 3.0)
    assert (rounds.plan(8, 4.0) == behind) == drafting


@pytest.mark.parametrize(
    ("fields", "named"), [({"batches": (1, 0)}, "batches"), ({"decode_on": -1}, "decode_on")]
)
def test_a_plan_that_cannot_be_is_refused(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Plan(FixedTrigger(1), **fields)


def test_what_a_pause_of_the_client_distorts_is_not_told() -> None:
    """Drafts that came during it share its time, and the next one counts from there."""
    control = Recorder([Plan(FixedTrigger(4))])
    rounds = Rounds(control)
    rounds.nav_sent(5, 9, 4, 100.0)
    rounds.drafted(10.0)
    rounds.paused()
    for ms in (2.0, 0.0, 0.0, 3.0, 11.0):
        rounds.drafted(ms)
    rounds.answered(Verdict("s", 0, 5, VerdictKind.BONUS, 4, 1, verify_ms=30.0), 500.0)
    assert control.of(Drafted) == [Drafted(10.0), Drafted(11.0)]
    assert control.of(Answered) == []
    assert len(control.of(Interrupted)) == 1


def test_tokens_that_the_target_writes_alone_are_not_told_as_drafted_ones() -> None:
    control = Recorder([Plan(FixedTrigger(4))])
    run(control, SessionConfig(speculate=False))
    assert control.of(Committed) == []
    assert control.of(Judged) == []


def test_a_nav_replaces_what_was_left_to_decode_after_the_one_before_it() -> None:
    """So that a session whose drafter is lost then asks at once, and not after a silence."""
    control = Recorder([Plan(FixedTrigger(1), decode_on=8), Plan(FixedTrigger(1))])
    config = SessionConfig(max_window=16, max_navs_in_flight=4, draft_while_waiting=True)
    outcome = run(control, config, acceptance=0.5)
    assert outcome.metrics.resends == 0
