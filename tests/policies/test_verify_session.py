"""The cloud's half: claims about single messages."""

from __future__ import annotations

import copy

import pytest

from policies.events import Check, Checked, CloudAction, EngineFailed, Prefill, Prefilled, Reply
from policies.types import Batch, Open, SamplingParams, SessionError, Verdict, VerdictKind
from policies.verify_session import VerifySession

PROMPT = (7, 8, 9)
END = 0
SAMPLING = SamplingParams(stop_ids=frozenset({END}))


def opening(epoch: int = 0, generated: tuple[int, ...] = ()) -> Open:
    return Open("s", epoch, PROMPT, generated, SAMPLING)


def opened(context: int = 100, max_window: int = 16) -> VerifySession:
    session = VerifySession("s", context=context, vocab_size=50, max_window=max_window)
    session.handle(opening())
    session.handle(Prefilled())
    return session


def batch(start: int, *ids: int, epoch: int = 0, nav: bool = True, decode_on: int = 0) -> Batch:
    return Batch("s", epoch, start, ids, nav, decode_on)


def verdicts(actions: list[CloudAction]) -> list[tuple]:
    return [
        (v.kind.value, v.epoch, v.start, v.accepted, v.next_id)
        for action in actions
        if isinstance(action, Reply)
        for v in [action.verdict]
    ]


def test_open_prefills_and_is_then_acknowledged() -> None:
    session = VerifySession("s", context=100, vocab_size=50, max_window=16)
    assert session.handle(opening()) == [Prefill(PROMPT, SAMPLING)]
    assert verdicts(session.handle(Prefilled())) == [("accepted", 0, 3, 0, None)]


def test_batches_before_the_prefill_ends_are_held() -> None:
    session = VerifySession("s", context=100, vocab_size=50, max_window=16)
    session.handle(opening())
    assert session.handle(batch(3, 1, 2)) == []
    assert session.handle(Prefilled())[-1] == Check(2, (9, 1, 2))


def test_a_nav_feeds_the_last_verified_id_and_the_drafts() -> None:
    session = opened()
    assert session.handle(batch(3, 1, 2)) == [Check(2, (9, 1, 2))]
    assert verdicts(session.handle(Checked([1, 2, 5]))) == [("bonus", 0, 3, 2, 5)]
    assert session.verified_len == 6


def test_the_first_difference_is_recovered_and_closes_the_epoch() -> None:
    session = opened()
    session.handle(batch(3, 1, 2, 3))
    assert verdicts(session.handle(Checked([1, 6, 8, 8]))) == [("recovered", 0, 3, 1, 6)]
    assert verdicts(session.handle(batch(6, 4))) == [("void", 0, 6, 0, None)]
    # a repeated NAV gets the same verdict again, and costs no forward
    assert verdicts(session.handle(batch(3, 1, 2, 3))) == [("recovered", 0, 3, 1, 6)]


def test_a_new_epoch_may_overlap_what_is_verified_and_only_the_rest_is_checked() -> None:
    session = opened()
    session.handle(batch(3, 1, 2))
    session.handle(Checked([1, 6]))
    assert session.handle(batch(4, 6, 4, epoch=1)) == [Check(4, (6, 4))]


def test_a_new_epoch_that_disagrees_with_what_is_verified_is_told_the_verified_token() -> None:
    session = opened()
    session.handle(batch(3, 1, 2))
    session.handle(Checked([1, 6]))
    assert verdicts(session.handle(batch(4, 5, 4, epoch=1))) == [("recovered", 1, 4, 0, 6)]
    assert verdicts(session.handle(batch(6, 3, epoch=1))) == [("void", 1, 6, 0, None)]


def test_drafts_that_disagree_with_the_bonus_close_the_epoch() -> None:
    session = opened()
    session.handle(batch(3, 1, 2))
    session.handle(batch(5, 3, 4))
    replies = verdicts(session.handle(Checked([1, 2, 9])))
    assert replies == [("bonus", 0, 3, 2, 9), ("recovered", 0, 5, 0, 9)]
    assert verdicts(session.handle(batch(7, 5))) == [("void", 0, 7, 0, None)]


def test_navs_that_wait_for_a_forward_share_the_next_one() -> None:
    session = opened()
    session.handle(batch(3, 1))
    assert session.handle(batch(4, 2)) == []
    assert session.handle(batch(5, 3)) == []
    actions = session.handle(Checked([1, 2]))
    # 2 is both the bonus of the first NAV and the verdict on the second one's draft
    assert actions[-1] == Check(4, (2, 3))


def test_a_nav_behind_a_gap_is_told_the_expected_position_and_judged_once_it_is_filled() -> None:
    session = opened()
    assert verdicts(session.handle(batch(5, 3))) == [("gap", 0, 3, 0, None)]
    assert session.handle(batch(3, 1, 2, nav=False)) == [Check(2, (9, 1, 2, 3))]


def test_an_earlier_batch_that_disagrees_is_noticed_after_a_later_one_did() -> None:
    """Out of order: the epoch left the verified prefix earlier than first seen."""
    session = opened()
    session.handle(batch(3, decode_on=3))
    for token in (1, 2, 3, 4):
        session.handle(Checked([token]))
    session.handle(batch(5, 9, epoch=1, nav=False))
    assert verdicts(session.handle(batch(3, 8, 2, epoch=1))) == [("recovered", 1, 3, 0, 1)]


def test_a_verdict_covers_the_drafts_that_were_sent_ahead_of_the_nav() -> None:
    session = opened()
    session.handle(batch(3, 1, 2, nav=False))
    session.handle(batch(5, 3))
    assert verdicts(session.handle(Checked([1, 2, 3, 4]))) == [("bonus", 0, 3, 3, 4)]


def test_a_verdict_on_drafts_sent_ahead_that_fell_is_recovered_not_void() -> None:
    session = opened()
    session.handle(batch(3, decode_on=3))
    for token in (1, 2, 3, 4):
        session.handle(Checked([token]))
    session.handle(batch(3, 1, 9, epoch=1, nav=False))
    assert verdicts(session.handle(batch(5, 3, epoch=1))) == [("recovered", 1, 3, 1, 2)]


def test_a_verdict_never_covers_a_position_that_did_not_arrive() -> None:
    """What an earlier epoch's forward verified says nothing of a draft still on its way."""
    session = opened()
    session.handle(batch(3, 1, 2, 3))
    session.handle(batch(3, 1, epoch=1, nav=False))
    session.handle(Checked([1, 2, 3, 4]))
    assert verdicts(session.handle(batch(5, 3, epoch=1))) == [("bonus", 1, 5, 1, 4)]


def test_an_empty_nav_asks_for_the_next_token() -> None:
    session = opened()
    assert session.handle(batch(3)) == [Check(2, (9,))]
    assert verdicts(session.handle(Checked([4]))) == [("bonus", 0, 3, 0, 4)]


def test_decode_on_streams_a_verdict_for_every_further_token() -> None:
    session = opened()
    session.handle(batch(3, decode_on=2))
    assert session.handle(Checked([4]))[-1] == Check(3, (4,))
    assert verdicts(session.handle(Checked([5]))) == [("bonus", 0, 4, 0, 5)]
    assert verdicts(session.handle(Checked([6]))) == [("bonus", 0, 5, 0, 6)]
    assert session.verified_len == 6


def test_a_repeated_decode_on_is_answered_from_what_is_verified() -> None:
    session = opened()
    session.handle(batch(3, decode_on=2))
    for token in (4, 5, 6):
        session.handle(Checked([token]))
    assert verdicts(session.handle(batch(3, decode_on=2))) == [
        ("bonus", 0, 3, 0, 4),
        ("bonus", 0, 4, 0, 5),
        ("bonus", 0, 5, 0, 6),
    ]


def test_a_later_nav_replaces_the_decode_on_under_way() -> None:
    session = opened()
    session.handle(batch(3, decode_on=50))
    session.handle(Checked([4]))
    session.handle(batch(4, 5))
    assert session.handle(Checked([5]))[-1] == Check(4, (5,))
    actions = session.handle(Checked([6]))
    assert not [action for action in actions if isinstance(action, Check)]


def test_nothing_is_verified_past_an_accepted_stop_id() -> None:
    """C09 (a): the stop id is in the middle of the batch."""
    session = opened()
    session.handle(batch(3, 1, END, 5, decode_on=9))
    assert verdicts(session.handle(Checked([1, END, 5, 6]))) == [("accepted", 0, 3, 2, None)]
    assert session.verified_len == 5


def test_decode_on_ends_with_a_stop_id() -> None:
    session = opened()
    session.handle(batch(3, decode_on=9))
    actions = session.handle(Checked([END]))
    assert verdicts(actions) == [("bonus", 0, 3, 0, END)]
    assert len(actions) == 1


def test_a_lower_epoch_is_refused() -> None:
    session = opened()
    session.handle(opening(epoch=3))
    assert verdicts(session.handle(opening(epoch=2))) == [("void", 2, 3, 0, None)]
    assert verdicts(session.handle(batch(3, 1, epoch=2))) == [("void", 2, 3, 0, None)]


def test_a_repeated_open_is_acknowledged_again() -> None:
    assert verdicts(opened().handle(opening())) == [("accepted", 0, 3, 0, None)]


def test_reopening_a_living_session_keeps_what_is_verified() -> None:
    session = opened()
    session.handle(batch(3, 1, 2))
    session.handle(Checked([1, 2, 5]))
    assert verdicts(session.handle(opening(epoch=1, generated=(1,)))) == [
        ("accepted", 1, 6, 0, None)
    ]


def test_reopening_with_more_than_is_held_prefills_anew() -> None:
    session = opened()
    actions = session.handle(opening(epoch=1, generated=(1, 2)))
    assert actions == [Prefill((*PROMPT, 1, 2), SAMPLING)]


def test_a_forward_that_a_reopen_overtook_changes_nothing() -> None:
    session = opened()
    session.handle(batch(3, 1, 2))
    session.handle(opening(epoch=1, generated=(4, 4, 4)))
    assert session.handle(Checked([1, 2, 5])) == [Prefill((*PROMPT, 4, 4, 4), SAMPLING)]
    assert session.verified_len == 6


def test_a_forward_of_an_ended_epoch_still_tells_the_targets_tokens() -> None:
    session = opened()
    session.handle(batch(3, 1, 2))
    session.handle(batch(3, 1, 4, epoch=1))
    assert verdicts(session.handle(Checked([1, 6]))) == [("recovered", 1, 3, 1, 6)]


def test_an_engine_failure_is_told_and_the_session_can_be_opened_again() -> None:
    session = opened()
    session.handle(batch(3, 1))
    [reply] = session.handle(EngineFailed("non-finite logits"))
    assert isinstance(reply, Reply)
    assert reply.verdict == Verdict("s", 0, 3, VerdictKind.ERROR, error="non-finite logits")
    assert session.handle(opening(epoch=1)) == [Prefill(PROMPT, SAMPLING)]


def test_a_failure_of_a_forward_that_a_reopen_overtook_changes_nothing() -> None:
    session = opened()
    session.handle(batch(3, 1, 2))
    session.handle(opening(epoch=1, generated=(4, 4)))
    assert session.handle(EngineFailed("late")) == [Prefill((*PROMPT, 4, 4), SAMPLING)]


def test_an_earlier_nav_that_comes_late_does_not_stop_decoding_on() -> None:
    session = opened()
    session.handle(batch(3, 1))
    session.handle(Checked([1, 2]))
    session.handle(batch(5, decode_on=50))
    session.handle(batch(3, 1))
    assert session.handle(Checked([3]))[-1] == Check(5, (3,))


def test_an_id_outside_the_vocabulary_is_not_fed_and_falls() -> None:
    """C21: the draft's padding may be longer than the target's."""
    session = opened()
    assert session.handle(batch(3, 1, 50, 2)) == [Check(2, (9, 1))]
    assert verdicts(session.handle(Checked([1, 6]))) == [("recovered", 0, 3, 1, 6)]


def test_the_time_of_a_forward_is_told_once() -> None:
    session = opened()
    session.handle(batch(3, 1))
    session.handle(batch(4, 2))
    session.handle(batch(5, 3))
    session.handle(Checked([1, 2], 10.0))
    replies = session.handle(Checked([3, 4], 10.0))
    times = [action.verdict.verify_ms for action in replies if isinstance(action, Reply)]
    assert sum(times) == 10.0


def test_drafts_past_the_window_are_not_kept() -> None:
    session = opened(max_window=4)
    assert verdicts(session.handle(batch(8, 1, 2))) == [("gap", 0, 3, 0, None)]
    assert session.handle(batch(3, 1, 2, 3, 4, nav=False)) == []


@pytest.mark.parametrize(
    "illegal",
    [
        Checked([1]),  # nothing was asked
        Prefilled(),
        EngineFailed("late"),
        batch(3, 9),  # another draft at a position of the same epoch
        batch(0, 7),
        batch(99, 1),  # past the context
        batch(3, *[1] * 17),  # longer than the window
        Open("other", 1, PROMPT, (), SAMPLING),
        Open("s", 1, tuple(range(1, 101)), (), SAMPLING),  # no room
    ],
)
def test_an_illegal_message_raises_and_leaves_the_state_unchanged(illegal) -> None:
    session = opened()
    session.handle(batch(3, 1, 2, nav=False))
    before = copy.deepcopy(vars(session))
    with pytest.raises(SessionError):
        session.handle(illegal)
    assert vars(session) == before
