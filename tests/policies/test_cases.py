"""Public fault reports (the C numbers) that the two halves of the protocol must survive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from policies.costs import Costs
from policies.session import SessionConfig
from policies.simulate import Outcome, simulate
from policies.trigger import FixedTrigger
from policies.types import FinishReason, Ids
from tests.policies.toy import (
    END,
    DraftModel,
    FunctionPair,
    TargetModel,
    flaky,
    new_session,
    new_verifier,
    target_alone,
    toy_draft,
    toy_target,
)

PROMPT: Ids = (3, 1, 4, 1, 5)


def run(
    target: TargetModel,
    draft: DraftModel,
    draft_len: int,
    *,
    prompt: Ids = PROMPT,
    max_tokens: int = 60,
    stop_ids: frozenset[int] = frozenset(),
    draft_context: int = 10_000,
    target_context: int = 10_000,
    cancel_at_ms: float | None = None,
) -> Outcome:
    config = SessionConfig(trigger=FixedTrigger(draft_len), max_window=draft_len)
    return simulate(
        new_session(
            prompt,
            max_tokens=max_tokens,
            config=config,
            stop_ids=stop_ids,
            draft_context=draft_context,
            target_context=target_context,
        ),
        prompt,
        verifier=new_verifier,
        pair=FunctionPair(target, draft),
        link=flaky(one_way_ms=5),
        costs=Costs(draft_ms=1, verify_ms=3),
        rng=np.random.default_rng(0),
        cancel_at_ms=cancel_at_ms,
    )


def perfect(target: TargetModel) -> DraftModel:
    return toy_draft(target, lambda position: True)


def anti(target: TargetModel) -> DraftModel:
    return toy_draft(target, lambda position: False)


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 7, 11])
def test_exactly_max_tokens_are_delivered_when_every_draft_is_accepted(max_tokens: int) -> None:
    """C08: K = 5, a perfect drafter, and a budget that ends inside or beside a block."""
    target = toy_target(8)
    outcome = run(target, perfect(target), 5, max_tokens=max_tokens)
    assert outcome.ids == target_alone(target, PROMPT, max_tokens)
    assert outcome.metrics.committed == max_tokens
    assert outcome.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", range(1, 12))
def test_a_stop_id_ends_the_text_wherever_in_the_block_it_falls(length: int) -> None:
    """C09 (a): first, middle, last of a block of 8, as the bonus, and in the next block."""
    base = toy_target(9)

    def target(ids: Sequence[int]) -> int:
        return END if len(ids) == len(PROMPT) + length - 1 else base(ids)

    outcome = run(target, perfect(target), 8, stop_ids=frozenset({END}))
    assert outcome.ids == target_alone(target, PROMPT, 60, frozenset({END}))
    assert len(outcome.ids) == length
    assert outcome.finish.reason is FinishReason.STOP
    assert outcome.metrics.committed == length


def test_a_drafter_that_keeps_proposing_the_end_is_overruled_and_drafts_on() -> None:
    """C09 (b): the drafter proposes END at every third position; the target never does."""
    target = toy_target(10)
    good = perfect(target)
    outcome = run(
        target,
        lambda ids: (END, 0.9) if len(ids) % 3 == 0 else good(ids),
        8,
        stop_ids=frozenset({END}),
    )
    assert outcome.ids == target_alone(target, PROMPT, 60)
    assert outcome.metrics.accepted >= 20  # positions between two false ENDs are still drafted


@pytest.mark.parametrize("draft_len", [1, 3, 12])
def test_generation_stops_at_the_targets_context_with_the_exact_count(draft_len: int) -> None:
    """C17: context 100, prompt 93, K = 12: seven tokens and finish reason length."""
    target = toy_target(11)
    prompt = tuple(1 + i % 9 for i in range(93))
    outcome = run(
        target, perfect(target), draft_len, prompt=prompt, max_tokens=500, target_context=100
    )
    assert outcome.ids == target_alone(target, prompt, 7)
    assert outcome.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt_len", [5, 127, 128, 200])
def test_past_the_drafters_context_the_target_decodes_alone(prompt_len: int) -> None:
    """C17: drafter 128, target 512; also a prompt longer than the drafter's whole context."""
    target = toy_target(12)
    drafted_at: list[int] = []

    def draft(ids: Sequence[int]) -> tuple[int, float]:
        drafted_at.append(len(ids))
        return perfect(target)(ids)

    prompt = tuple(1 + i % 9 for i in range(prompt_len))
    outcome = run(
        target,
        draft,
        4,
        prompt=prompt,
        max_tokens=300,
        draft_context=128,
        target_context=512,
    )
    assert outcome.ids == target_alone(target, prompt, 300)
    assert max(drafted_at, default=0) < 128


@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
def test_a_perfect_drafter_loses_nothing_after_full_acceptance(draft_len: int) -> None:
    """C18: the drafter is told the bonus token, so its next draft follows it."""
    target = toy_target(13)
    outcome = run(target, perfect(target), draft_len, max_tokens=256)
    assert outcome.metrics.acceptance_rate == 1.0
    assert outcome.metrics.rollbacks == 0
    assert outcome.metrics.rounds == -(-256 // (draft_len + 1))


@pytest.mark.parametrize("draft_len", [1, 8])
def test_every_round_brings_a_token_when_no_draft_is_ever_accepted(draft_len: int) -> None:
    """C35: an anti drafter costs rounds, never progress or exactness."""
    target = toy_target(14)
    outcome = run(target, anti(target), draft_len, max_tokens=200)
    assert outcome.ids == target_alone(target, PROMPT, 200)
    assert outcome.metrics.rounds == 200
    assert outcome.metrics.accepted == 0
    assert outcome.metrics.acceptance_rate == 0.0


def test_metrics_of_a_cancelled_request_stay_consistent() -> None:
    """C40: a cut request counts what it delivered, and accepted never exceeds drafted."""
    target = toy_target(15)
    outcome = run(target, perfect(target), 4, max_tokens=1_000, cancel_at_ms=500)
    assert outcome.finish.reason is FinishReason.CANCELLED
    assert 0 < outcome.metrics.committed == len(outcome.ids) < 1_000
    assert outcome.metrics.accepted <= outcome.metrics.drafted


def test_metrics_without_drafts_have_no_acceptance_rate() -> None:
    """C40: nothing drafted is no rate, neither 0 nor 1."""
    target = toy_target(16)
    outcome = run(target, perfect(target), 4, max_tokens=1)
    assert outcome.metrics.drafted == 0
    assert outcome.metrics.acceptance_rate is None
    assert outcome.metrics.tpt_ms == outcome.metrics.ttft_ms


def test_metrics_count_a_block_cut_by_the_budget_once() -> None:
    """C40: perfect drafter, K = 4, 7 tokens: 4 + bonus, then one draft and the last token."""
    target = toy_target(17)
    metrics = run(target, perfect(target), 4, max_tokens=7).metrics
    assert (metrics.drafted, metrics.accepted, metrics.bonus, metrics.recovered) == (5, 5, 2, 0)
    assert metrics.acceptance_rate == 1.0
    assert metrics.acceptance_len == 3.5  # two NAVs
