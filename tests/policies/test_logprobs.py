"""Log-probabilities: closed forms, and one entry per emitted id whatever the link does (C26)."""

from __future__ import annotations

import json
import math
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.costs import Costs
from policies.events import (
    Check,
    Checked,
    CloudAction,
    CloudEvent,
    EdgeAction,
    EdgeEvent,
    Emit,
    Prefilled,
    Reply,
    TokenDrafted,
    VerdictArrived,
)
from policies.links import LinkModel
from policies.sampling import LEAST_LOGPROB, NonFiniteLogits, pick, token_logprobs
from policies.session import DraftSession, SessionConfig
from policies.simulate import simulate
from policies.trigger import FixedTrigger
from policies.types import (
    Batch,
    FinishReason,
    Ids,
    Open,
    Origin,
    SamplingParams,
    SessionError,
    TokenLogprobs,
    Verdict,
    VerdictKind,
)
from policies.verify_session import VerifySession
from tests.policies.test_two_sided import RUNS
from tests.policies.toy import END, VOCAB, FunctionPair, target_alone, toy_draft, toy_target

PROMPT: Ids = (3, 1, 4)
ASKED = SamplingParams(stop_ids=frozenset({END}), logprobs=1)


# --- closed forms ----------------------------------------------------------------------------


def test_logits_that_are_logs_of_probabilities_come_back_highest_first() -> None:
    probs = [0.125, 0.5, 0.125, 0.25]
    got = token_logprobs(np.log(probs) + 3.0, 2, 4)
    assert got.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert [token_id for token_id, _ in got.top] == [1, 3, 0, 2]  # the lower id among equals
    assert [math.exp(x) for _, x in got.top] == pytest.approx([0.5, 0.25, 0.125, 0.125])


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32) | st.just(-math.inf), min_size=1, max_size=9
    ),
    count=st.integers(0, 20),
    data=st.data(),
)
def test_any_row_gives_the_log_softmax_and_finite_json(
    logits: list[float], count: int, data: st.DataObject
) -> None:
    logits[data.draw(st.integers(0, len(logits) - 1))] = 2.5
    token_id = data.draw(st.integers(0, len(logits) - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = token_logprobs(np.array(logits, np.float32), token_id, count)
    peak = max(logits)
    log_total = peak + math.log(math.fsum(math.exp(x - peak) for x in logits))
    expected = [max(x - log_total, LEAST_LOGPROB) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert got.logprob == pytest.approx(expected[token_id], rel=1e-6, abs=1e-6)
    assert [i for i, _ in got.top] == ranked
    assert [x for _, x in got.top] == pytest.approx([expected[i] for i in ranked], abs=1e-6)
    assert max(got.logprob, *(x for _, x in got.top), -math.inf) <= 0.0
    assert json.loads(json.dumps([got.logprob, got.top], allow_nan=False))
    assert all(type(i) is int and type(x) is float for i, x in got.top)


def test_a_masked_id_has_the_least_logprob_and_comes_last() -> None:
    got = token_logprobs([-math.inf, 0.0, -math.inf], 0, 5)
    assert got == TokenLogprobs(LEAST_LOGPROB, ((1, 0.0), (0, LEAST_LOGPROB), (2, LEAST_LOGPROB)))


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_rows_that_mean_nothing_are_refused(bad: list[float]) -> None:
    with pytest.raises(NonFiniteLogits):
        token_logprobs(bad, 0, 1)


def test_temperature_filters_penalties_and_bias_leave_the_logprobs_alone() -> None:
    row = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    changed = SamplingParams(
        1.7, 2, 0.9, 4, 1.5, 0.5, 1.4, ((3, 50.0),), 9, frozenset({0}), logprobs=4, prompt_len=1
    )
    choice = pick(row, changed, [0, 1, 3], 3)
    assert choice.id == 3
    assert choice.logprobs == token_logprobs(row, 3, 4)
    assert choice.confidence == pytest.approx(math.exp(choice.logprobs.logprob))


# --- the two halves --------------------------------------------------------------------------


def mark(position: int, token_id: int) -> TokenLogprobs:
    """An entry that tells which id at which position it is of."""
    return TokenLogprobs(-float(position), ((token_id, -0.5),))


class Scoring(VerifySession):
    """A verifier whose engine gives a mark with every target id."""

    def handle(self, event: CloudEvent) -> list[CloudAction]:
        if isinstance(event, Checked):
            marks = [mark(self.verified_len + i, x) for i, x in enumerate(event.target_ids)]
            event = replace(event, logprobs=marks)
        return super().handle(event)


class Recording(DraftSession):
    """An edge that keeps its Emits; `generated` grows only by them."""

    def __init__(self, sampling: SamplingParams, max_tokens: int, config: SessionConfig) -> None:
        sizes = {"max_tokens": max_tokens, "draft_context": 999, "target_context": 999}
        super().__init__("s", PROMPT, sampling=sampling, config=config, **sizes)
        self.emits: list[Emit] = []

    def handle(self, event: EdgeEvent) -> list[EdgeAction]:
        actions = super().handle(event)
        self.emits += [action for action in actions if isinstance(action, Emit)]
        return actions

    def assert_every_id_has_its_own_mark(self) -> None:
        position = len(PROMPT)
        for emit in self.emits:
            marks = tuple(mark(position + i, x) for i, x in enumerate(emit.ids))
            assert emit.logprobs == marks
            position += len(emit.ids)


def scoring() -> Scoring:
    return Scoring("s", context=10_000, vocab_size=VOCAB, max_window=64)


@settings(max_examples=250, deadline=None)
@given(
    **RUNS,
    max_tokens=st.integers(1, 40),
    asked=st.booleans(),
)
def test_every_emitted_id_carries_its_own_entry_whatever_the_link_does(
    seed: int,
    config: SessionConfig,
    link: LinkModel,
    deaths: Any,
    acceptance: float,
    end_every: int,
    max_tokens: int,
    asked: bool,
) -> None:
    """C26: accepted, recovered and bonus alike; late, repeated, lost verdicts; dead verifiers."""
    rng = np.random.default_rng(seed)
    agrees = rng.random(1_000) < acceptance
    target = toy_target(seed, end_every=end_every)
    sampling = replace(ASKED, logprobs=1 if asked else None)
    session = Recording(sampling, max_tokens, config)
    outcome = simulate(
        session,
        PROMPT,
        verifier=scoring,
        pair=FunctionPair(target, toy_draft(target, lambda position: bool(agrees[position]))),
        link=link,
        costs=Costs(draft_ms=10, verify_ms=15),
        rng=rng,
        deaths=deaths,
    )
    assert outcome.ids == target_alone(target, PROMPT, max_tokens, ASKED.stop_ids)
    if asked:
        session.assert_every_id_has_its_own_mark()
    else:
        assert all(emit.logprobs == () for emit in session.emits)


WAITING = SessionConfig(
    trigger=FixedTrigger(2), max_window=8, max_navs_in_flight=4, draft_while_waiting=True
)


def drafting(drafts: Ids, *, stop_ids: frozenset[int] = frozenset()) -> Recording:
    """An acknowledged edge that has drafted these ids."""
    session = Recording(replace(ASKED, stop_ids=stop_ids), 20, WAITING)
    session.start(0.0)
    session.handle(VerdictArrived(Verdict("s", 0, 3, VerdictKind.ACCEPTED), 0.0))
    for position, draft_id in enumerate(drafts, len(PROMPT)):
        session.handle(TokenDrafted(0, position, draft_id, 0.9, 0.0))
    return session


def told(session: Recording, start: int, ids: Ids, kind: VerdictKind = VerdictKind.BONUS) -> None:
    """A verdict on `ids` from `start` on, the last of them its next id."""
    marks = tuple(mark(start + i, x) for i, x in enumerate(ids))
    accepted, next_id = len(ids) - 1, ids[-1]
    verdict = Verdict("s", session.epoch, start, kind, accepted, next_id, logprobs=marks)
    session.handle(VerdictArrived(verdict, 1.0))


def test_a_draft_that_equals_the_next_id_takes_the_next_ids_entry() -> None:
    session = drafting((5, 6, 7, 8))
    told(session, 3, (5, 6, 7))
    assert session.emits[0].origins == (Origin.ACCEPTED,) * 3
    told(session, 5, (7, 8, 9))
    assert session.emits[1].origins == (Origin.ACCEPTED, Origin.BONUS)
    session.assert_every_id_has_its_own_mark()


@pytest.mark.parametrize(
    "order", [["first", "first", "both"], ["second", "first"], ["both", "second", "first"]]
)
def test_repeated_overlapping_and_early_verdicts_emit_each_entry_once(order: list[str]) -> None:
    session = drafting((5, 6, 7, 8))
    says = {"first": (3, (5, 6, 7)), "second": (5, (7, 8, 9)), "both": (3, (5, 6, 7, 8, 9))}
    for name in order:
        told(session, *says[name])
    assert session.generated == (5, 6, 7, 8, 9)
    session.assert_every_id_has_its_own_mark()


def test_a_stop_id_inside_a_verdict_cuts_ids_origins_and_entries_alike() -> None:
    session = drafting((5, 6), stop_ids=frozenset({6}))
    told(session, 3, (5, 6, 7))
    assert session.emits[0].ids == (5, 6)
    assert len(session.emits[0].logprobs) == len(session.emits[0].origins) == 2
    assert session.finished is not None
    assert session.finished.reason is FinishReason.STOP
    session.assert_every_id_has_its_own_mark()


def test_a_verdict_that_lacks_entries_is_refused_not_emitted_without_them() -> None:
    """Fewer entries than ids would shift every later entry of the client's list."""
    session = drafting((5, 6))
    with suppress(SessionError):
        session.handle(VerdictArrived(Verdict("s", 0, 3, VerdictKind.BONUS, 2, 7), 1.0))
    assert all(len(emit.logprobs) == len(emit.ids) for emit in session.emits)


def opened(generated: Ids = (), epoch: int = 0, verifier: Scoring | None = None) -> Scoring:
    verifier = verifier or scoring()
    actions = verifier.handle(Open("s", epoch, PROMPT, generated, ASKED))
    if not isinstance(actions[0], Reply):
        verifier.handle(Prefilled())
    return verifier


def verdict_on(verifier: Scoring, batch: Batch, target_ids: Ids) -> Verdict:
    """The verdict on a NAV that needs one forward, in which the target says `target_ids`."""
    (check,) = verifier.handle(batch)
    assert isinstance(check, Check)
    (reply,) = verifier.handle(Checked(target_ids))
    assert isinstance(reply, Reply)
    return reply.verdict


def test_a_verdict_that_is_given_again_has_the_same_entries() -> None:
    verifier = opened()
    batch = Batch("s", 0, 3, (5, 6), nav=True)
    first = verdict_on(verifier, batch, (5, 9))
    assert (first.kind, first.logprobs) == (VerdictKind.RECOVERED, (mark(3, 5), mark(4, 9)))
    (again,) = verifier.handle(batch)
    assert isinstance(again, Reply)
    assert replace(again.verdict, verify_ms=0.0) == replace(first, verify_ms=0.0)


def test_a_reopen_at_the_verifier_that_holds_the_prefix_keeps_its_entries() -> None:
    """The verdict was lost, not the verifier: the next epoch is answered without a forward."""
    verifier = opened()
    verdict_on(verifier, Batch("s", 0, 3, (5, 6), nav=True), (5, 6, 7))
    opened((5,), epoch=1, verifier=verifier)
    (reply,) = verifier.handle(Batch("s", 1, 4, (6,), nav=True))
    assert isinstance(reply, Reply)
    assert reply.verdict.logprobs == (mark(4, 6), mark(5, 7))


def test_a_reopen_with_another_prefix_forgets_the_entries_of_the_old_one() -> None:
    verifier = opened()
    verdict_on(verifier, Batch("s", 0, 3, (5, 6), nav=True), (5, 6, 7))
    opened((8, 8), epoch=1, verifier=verifier)
    verdict = verdict_on(verifier, Batch("s", 1, 5, (), nav=True), (1,))
    assert verdict.logprobs == (mark(5, 1),)
    (again,) = verifier.handle(Batch("s", 1, 3, (8, 8), nav=True))
    assert isinstance(again, Reply)
    assert again.verdict.logprobs == (None, None, mark(5, 1))


def test_decoded_on_tokens_have_an_entry_each() -> None:
    verifier = opened()
    verifier.handle(Batch("s", 0, 3, (), nav=True, decode_on=1))
    for position, target_id in ((3, 4), (4, 6)):
        reply = verifier.handle(Checked((target_id,)))[0]
        assert isinstance(reply, Reply)
        assert reply.verdict.logprobs == (mark(position, target_id),)


def test_entries_for_only_some_of_the_checked_ids_are_refused_and_change_nothing() -> None:
    """Else the forward is forgotten half taken in, and nothing answers the edge any more."""
    verifier = opened()
    verifier.handle(Batch("s", 0, 3, (5, 6), nav=True))
    with pytest.raises(SessionError):
        VerifySession.handle(verifier, Checked((5, 6, 7), logprobs=(mark(3, 5),)))
    assert verifier.verified_len == len(PROMPT)
    assert verifier.handle(Checked((5, 6, 7))) != []
