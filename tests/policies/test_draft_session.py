"""The edge's half: claims about single events."""

from __future__ import annotations

import copy

import pytest

from policies.events import (
    Cancelled,
    CloseSession,
    DeadlinePassed,
    DrafterLost,
    EdgeAction,
    Emit,
    Finish,
    GrantDraft,
    LinkLost,
    LinkRestored,
    OpenSession,
    RewindDrafter,
    SendBatch,
    SetDeadline,
    TokenDrafted,
    VerdictArrived,
)
from policies.session import DraftSession, SessionConfig
from policies.trigger import FixedTrigger, TokenTrigger
from policies.types import Batch, FinishReason, Origin, SessionError, Verdict, VerdictKind
from tests.policies.toy import END, new_session

PROMPT = (7, 8, 9)
WINDOW = SessionConfig(
    trigger=FixedTrigger(2), max_window=8, max_navs_in_flight=4, draft_while_waiting=True
)


def started(config: SessionConfig, **limits: int) -> DraftSession:
    session = new_session(
        PROMPT, config=config, stop_ids=frozenset({END}), **({"max_tokens": 20} | limits)
    )
    session.start(0.0)
    return session


def draft(session: DraftSession, *ids: int, at: int, epoch: int = 0) -> list[EdgeAction]:
    actions: list[EdgeAction] = []
    for position, token_id in enumerate(ids, at):
        actions += session.handle(TokenDrafted(epoch, position, token_id, 0.9, 1.0))
    return actions


def verdict(
    session: DraftSession,
    kind: VerdictKind,
    start: int,
    *,
    accepted: int = 0,
    next_id: int | None = None,
    epoch: int = 0,
    error: str = "",
) -> list[EdgeAction]:
    message = Verdict("s", epoch, start, kind, accepted, next_id, error=error)
    return session.handle(VerdictArrived(message, 2.0))


def batches(actions: list[EdgeAction]) -> list[Batch]:
    return [action.message for action in actions if isinstance(action, SendBatch)]


def emitted(actions: list[EdgeAction]) -> tuple[int, ...]:
    return tuple(i for action in actions if isinstance(action, Emit) for i in action.ids)


def only(kind: type, actions: list[EdgeAction]) -> list[EdgeAction]:
    return [action for action in actions if isinstance(action, kind)]


def test_start_opens_the_session_and_grants_one_draft() -> None:
    session = new_session(PROMPT, max_tokens=20, config=SessionConfig())
    actions = session.start(0.0)
    assert [type(action) for action in actions] == [OpenSession, GrantDraft, SetDeadline]
    assert actions[1] == GrantDraft(epoch=0, start=3, count=4)


def test_the_draft_that_fires_the_trigger_is_in_the_nav() -> None:
    session = started(SessionConfig(trigger=TokenTrigger(0.95, 8), max_window=8))
    assert batches(draft(session, 1, at=3)) == [Batch("s", 0, 3, (1,), nav=True)]


def test_accepted_drafts_and_the_bonus_are_emitted_with_their_origin() -> None:
    session = started(SessionConfig(trigger=FixedTrigger(2), max_window=2))
    draft(session, 1, 2, at=3)
    actions = verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=5)
    assert Emit((1, 2, 5), (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)) in actions
    # the drafter never saw the bonus token: it is told, and drafts on after it
    assert RewindDrafter(epoch=0, length=5, ids=(5,)) in actions
    assert GrantDraft(epoch=0, start=6, count=2) in actions
    assert session.epoch == 0


def test_a_rejection_rolls_back_rewinds_the_drafter_and_starts_an_epoch() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    actions = verdict(session, VerdictKind.RECOVERED, 3, accepted=1, next_id=6)
    assert emitted(actions) == (1, 6)
    assert RewindDrafter(epoch=1, length=4, ids=(6,)) in actions
    assert session.epoch == 1
    assert session.metrics.rollbacks == 1


def test_a_bonus_equal_to_the_own_draft_counts_as_accepted_and_the_window_stands() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    actions = verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=3)
    assert Emit((1, 2, 3), (Origin.ACCEPTED,) * 3) in actions
    assert session.epoch == 0
    assert not only(RewindDrafter, actions)


def test_a_bonus_that_differs_from_the_own_draft_rolls_back() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    actions = verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=9)
    origins = (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)
    assert Emit((1, 2, 9), origins, refuted=True) in actions
    assert RewindDrafter(epoch=1, length=5, ids=(9,)) in actions


def test_stale_verdict_is_ignored_after_rewind() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    verdict(session, VerdictKind.RECOVERED, 3, next_id=6)
    assert verdict(session, VerdictKind.BONUS, 5, accepted=2, next_id=7) == []
    assert session.generated == (6,)


def test_stale_draft_is_ignored_after_rewind() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, at=3)
    verdict(session, VerdictKind.RECOVERED, 3, next_id=6)
    assert draft(session, 3, at=5, epoch=0) == []
    assert session.metrics.drafted == 2


def test_a_repeated_verdict_commits_nothing_twice() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=3)
    assert emitted(verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=3)) == ()
    assert session.generated == (1, 2, 3)


def test_a_verdict_that_overtook_its_predecessor_waits_for_it() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    assert emitted(verdict(session, VerdictKind.BONUS, 5, accepted=2, next_id=5)) == ()
    actions = verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=3)
    assert emitted(actions) == (1, 2, 3, 4, 5)


def test_a_late_draft_that_disagrees_with_a_committed_token_rewinds_the_drafter() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, at=3)
    verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=5)
    actions = draft(session, 4, at=5)
    assert RewindDrafter(epoch=1, length=5, ids=(5,)) in actions
    assert session.metrics.drafted == 2


def test_a_late_draft_that_agrees_goes_on() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, at=3)
    verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=5)
    assert not only(RewindDrafter, draft(session, 5, 6, at=5))
    assert session.epoch == 0


def test_navs_keep_flowing_while_verdicts_are_out() -> None:
    session = started(WINDOW)
    sent = batches(draft(session, 1, 2, 3, 4, 5, 6, at=3))
    assert [(batch.start, batch.ids) for batch in sent if batch.nav] == [
        (3, (1, 2)),
        (5, (3, 4)),
        (7, (5, 6)),
    ]


def test_no_nav_leaves_beyond_the_number_in_flight() -> None:
    config = SessionConfig(
        trigger=FixedTrigger(2), max_window=8, max_navs_in_flight=1, draft_while_waiting=True
    )
    session = started(config)
    assert len(batches(draft(session, 1, 2, 3, 4, 5, at=3))) == 1
    sent = batches(verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=3))
    assert sent == [Batch("s", 0, 6, (4, 5), nav=True)]


def test_drafts_are_sent_ahead_of_their_nav_when_a_batch_is_full() -> None:
    config = SessionConfig(trigger=FixedTrigger(4), max_window=4, batch_len=2)
    sent = batches(draft(started(config), 1, 2, 3, 4, at=3))
    assert sent == [Batch("s", 0, 3, (1, 2), nav=False), Batch("s", 0, 5, (3, 4), nav=True)]


def test_a_drafted_stop_id_forces_a_nav_and_pauses_drafting() -> None:
    session = started(WINDOW)
    actions = draft(session, END, at=3)
    assert batches(actions) == [Batch("s", 0, 3, (END,), nav=True)]
    assert not only(GrantDraft, actions)


def test_after_a_rejected_stop_id_drafting_goes_on() -> None:
    """C09 (b)."""
    session = started(WINDOW)
    draft(session, END, at=3)
    actions = verdict(session, VerdictKind.RECOVERED, 3, next_id=6)
    assert only(GrantDraft, actions) == [GrantDraft(epoch=1, start=4, count=8)]


def test_the_last_position_is_never_drafted() -> None:
    session = started(SessionConfig(), max_tokens=1)
    assert session.speculating
    session = new_session(PROMPT, max_tokens=1, config=SessionConfig())
    actions = session.start(0.0)
    assert batches(actions) == [Batch("s", 0, 3, (), nav=True)]
    assert not only(GrantDraft, actions)


def test_a_void_nav_is_asked_again_in_a_new_epoch() -> None:
    session = started(SessionConfig(trigger=FixedTrigger(2), max_window=2))
    draft(session, 1, 2, at=3)
    assert batches(verdict(session, VerdictKind.VOID, 3)) == [Batch("s", 1, 3, (1, 2), nav=True)]


def test_a_gap_is_filled_once_from_the_expected_position() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    sent = batches(verdict(session, VerdictKind.GAP, 3))
    assert sent == [Batch("s", 0, 3, (1, 2, 3, 4), nav=True)]
    assert batches(verdict(session, VerdictKind.GAP, 3)) == []


def test_an_unknown_session_is_opened_again_with_the_committed_ids_and_the_window() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, at=3)
    verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=5)
    draft(session, 5, 6, 7, at=5)
    actions = verdict(session, VerdictKind.UNKNOWN_SESSION, 6)
    [opening] = only(OpenSession, actions)
    assert isinstance(opening, OpenSession)
    assert (opening.message.epoch, opening.message.generated) == (1, (1, 2, 5))
    assert batches(actions) == [Batch("s", 1, 6, (6, 7), nav=True)]


def test_unknown_session_before_the_acknowledgement_waits_for_the_open() -> None:
    session = started(WINDOW)
    assert not only(OpenSession, verdict(session, VerdictKind.UNKNOWN_SESSION, 3))


def test_a_batch_that_overtook_its_open_is_sent_again_at_the_acknowledgement() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, at=3)
    verdict(session, VerdictKind.UNKNOWN_SESSION, 3)
    sent = batches(verdict(session, VerdictKind.ACCEPTED, 3))
    assert sent == [Batch("s", 0, 3, (1, 2), nav=True)]


def test_a_gap_that_its_own_verdict_overtook_changes_nothing_unless_silence_follows() -> None:
    session = started(SessionConfig(trigger=FixedTrigger(2), max_window=2, resend_after_ms=100))
    draft(session, 1, 2, at=3)
    verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=5)
    draft(session, 6, 7, at=6)
    assert not only(OpenSession, verdict(session, VerdictKind.GAP, 3))
    assert only(OpenSession, session.handle(DeadlinePassed(102.0)))


def test_an_early_verdict_is_not_replaced_by_one_that_says_less() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, 3, 4, at=3)
    verdict(session, VerdictKind.BONUS, 5, accepted=2, next_id=5)
    verdict(session, VerdictKind.ACCEPTED, 5)
    actions = verdict(session, VerdictKind.BONUS, 3, accepted=2, next_id=3)
    assert emitted(actions) == (1, 2, 3, 4, 5)


def test_a_session_that_every_verifier_takes_and_loses_is_ended() -> None:
    session = started(WINDOW)
    for epoch in range(4):
        verdict(session, VerdictKind.ACCEPTED, 3, epoch=epoch)
        session.handle(LinkLost(3.0))
        assert only(OpenSession, session.handle(LinkRestored(4.0)))
    verdict(session, VerdictKind.ACCEPTED, 3, epoch=4)
    session.handle(LinkLost(3.0))
    assert session.handle(LinkRestored(4.0))[-1] == Finish(
        FinishReason.ERROR, "5 verifiers in a row took the session and lost it"
    )


def test_a_restored_link_reopens_with_the_next_epoch() -> None:
    session = started(WINDOW)
    draft(session, 1, 2, at=3)
    session.handle(LinkLost(3.0))
    assert batches(draft(session, 3, 4, at=5)) == []
    actions = session.handle(LinkRestored(4.0))
    assert batches(actions) == [Batch("s", 1, 3, (1, 2, 3, 4), nav=True)]
    assert session.metrics.reopens == 1


def test_silence_is_answered_by_sending_again_each_time_later() -> None:
    session = started(SessionConfig(resend_after_ms=100))
    verdict(session, VerdictKind.ACCEPTED, 3)
    draft(session, 1, 2, 3, 4, at=3)  # sent at 1 ms
    again = [Batch("s", 0, 3, (1, 2, 3, 4), nav=True)]
    assert batches(session.handle(DeadlinePassed(100.0))) == []
    first = session.handle(DeadlinePassed(101.0))
    assert batches(first) == again
    assert SetDeadline(301.0) in first
    assert batches(session.handle(DeadlinePassed(301.0))) == again
    assert session.metrics.resends == 2


def test_a_verifier_that_stays_silent_ends_the_request_with_an_error() -> None:
    session = started(SessionConfig(resend_after_ms=100, give_up_after_ms=1_000))
    session.handle(DeadlinePassed(100.0))
    actions = session.handle(DeadlinePassed(1_000.0))
    assert actions[-1] == Finish(FinishReason.ERROR, "the verifier was silent for 1 s")


def test_a_drafter_that_stalls_is_given_up_and_the_target_decodes_alone() -> None:
    """C35: a hanging drafter degrades to plain decoding."""
    session = started(SessionConfig(drafter_timeout_ms=50))
    verdict(session, VerdictKind.ACCEPTED, 3)  # at 2 ms
    assert session.handle(DeadlinePassed(52.0)) == []  # the first token may wait for a prefill
    actions = session.handle(DeadlinePassed(52.0 + 3 * 20.0))
    assert batches(actions) == [Batch("s", 0, 3, (), nav=True, decode_on=19)]
    assert not session.speculating


def test_a_lost_drafter_leaves_its_drafts_to_the_verifier() -> None:
    session = started(SessionConfig())
    draft(session, 1, 2, at=3)
    actions = session.handle(DrafterLost(3.0))
    assert batches(actions) == [Batch("s", 0, 3, (1, 2), nav=True, decode_on=17)]


def test_an_error_verdict_ends_the_request_with_its_text() -> None:
    session = started(SessionConfig())
    actions = verdict(session, VerdictKind.ERROR, 3, error="non-finite logits")
    assert actions[-1] == Finish(FinishReason.ERROR, "non-finite logits")


def test_cancelling_closes_and_nothing_comes_after() -> None:
    session = started(SessionConfig())
    actions = session.handle(Cancelled(3.0))
    assert [type(action) for action in actions] == [CloseSession, Finish]
    assert draft(session, 1, at=3) == []


@pytest.mark.parametrize(
    "illegal",
    [
        TokenDrafted(0, 4, 1, 0.9, 1.0),  # skips a position
        TokenDrafted(1, 3, 1, 0.9, 1.0),  # an epoch that the edge has not begun
        VerdictArrived(Verdict("other", 0, 3, VerdictKind.BONUS, 0, 1), 1.0),
        VerdictArrived(Verdict("s", 1, 3, VerdictKind.BONUS, 0, 1), 1.0),
        VerdictArrived(Verdict("s", 0, 3, VerdictKind.BONUS, 1, 1), 1.0),  # nothing was sent
        VerdictArrived(Verdict("s", 0, 3, VerdictKind.RECOVERED, 0, 1), 1.0),
        VerdictArrived(Verdict("s", 0, 2, VerdictKind.BONUS, 0, 1), 1.0),  # contradicts the prompt
    ],
)
def test_an_illegal_event_raises_and_leaves_the_state_unchanged(illegal) -> None:
    session = started(SessionConfig())
    before = copy.deepcopy(session)
    with pytest.raises(SessionError):
        session.handle(illegal)
    rounds = vars(session).pop("_rounds")
    assert vars(rounds) == vars(vars(before).pop("_rounds"))
    assert vars(session) == vars(before)


def test_more_drafts_than_granted_are_refused() -> None:
    """C35: a drafter that returns more than its credit."""
    session = started(SessionConfig(trigger=FixedTrigger(2), max_window=2))
    draft(session, 1, 2, at=3)
    with pytest.raises(SessionError):
        draft(session, 3, at=5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_window": 3}, "max_window"),
        ({"max_navs_in_flight": 0}, "max_navs_in_flight"),
        ({"batch_len": 0}, "batch_len"),
        ({"resend_after_ms": 0}, "resend_after_ms"),
    ],
)
def test_a_bad_setting_is_named(fields: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SessionConfig(**fields)


def test_an_empty_prompt_or_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        new_session((), max_tokens=1, config=SessionConfig())
    with pytest.raises(ValueError, match="max_tokens"):
        new_session(PROMPT, max_tokens=0, config=SessionConfig())
