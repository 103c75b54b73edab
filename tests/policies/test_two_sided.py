"""Both halves of the protocol joined over a faulty link: the output is the target's own, always."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.costs import Costs
from policies.links import LinkModel
from policies.session import SessionConfig
from policies.simulate import Death, Outcome, simulate
from policies.trigger import (
    DualThresholdTrigger,
    FixedTrigger,
    SequenceTrigger,
    TokenTrigger,
    Trigger,
)
from policies.types import FinishReason, Ids
from tests.policies.toy import (
    END,
    FunctionPair,
    flaky,
    new_session,
    new_verifier,
    target_alone,
    toy_draft,
    toy_target,
)

PROMPT: Ids = (3, 1, 4, 1, 5)


def run(
    seed: int,
    config: SessionConfig,
    link: LinkModel,
    *,
    max_tokens: int = 40,
    acceptance: float = 0.7,
    end_every: int = 0,
    deaths: tuple[Death, ...] = (),
    costs: Costs | None = None,
) -> tuple[Outcome, Ids]:
    """The outcome of one simulated session, and what the target writes alone."""
    rng = np.random.default_rng(seed)
    agreement = rng.random(10_000) < acceptance
    target = toy_target(seed, end_every=end_every)
    stop_ids = frozenset({END}) if end_every else frozenset()
    outcome = simulate(
        new_session(PROMPT, max_tokens=max_tokens, config=config, stop_ids=stop_ids),
        PROMPT,
        verifier=new_verifier,
        pair=FunctionPair(target, toy_draft(target, lambda position: bool(agreement[position]))),
        link=link,
        costs=costs or Costs(draft_ms=10, verify_ms=15, verify_ms_per_token=1),
        rng=rng,
        deaths=deaths,
    )
    return outcome, target_alone(target, PROMPT, max_tokens, stop_ids)


def triggers() -> st.SearchStrategy[Trigger]:
    length = st.integers(1, 8)
    threshold = st.floats(0, 1)
    return st.one_of(
        st.builds(FixedTrigger, length),
        st.builds(TokenTrigger, threshold, length),
        st.builds(SequenceTrigger, threshold, length),
        st.builds(DualThresholdTrigger, threshold, threshold, length),
    )


@st.composite
def configs(draw: st.DrawFn) -> SessionConfig:
    return SessionConfig(
        trigger=draw(triggers()),
        max_window=draw(st.integers(8, 24)),
        max_navs_in_flight=draw(st.integers(1, 6)),
        draft_while_waiting=draw(st.booleans()),
        batch_len=draw(st.none() | st.integers(1, 4)),
        speculate=draw(st.sampled_from([True, True, True, False])),
        resend_after_ms=draw(st.floats(20, 400)),
        give_up_after_ms=1e9,
        drafter_timeout_ms=draw(st.sampled_from([5.0, 1e6, 1e6])),
    )


def links() -> st.SearchStrategy[LinkModel]:
    return st.builds(
        flaky,
        one_way_ms=st.floats(0, 100),
        jitter_ms=st.sampled_from([0.0, 5.0, 60.0]),
        loss=st.sampled_from([0.0, 0.1, 0.4]),
        duplication=st.sampled_from([0.0, 0.2]),
    )


def deaths() -> st.SearchStrategy[tuple[Death, ...]]:
    death = st.builds(Death, st.floats(0, 3000), st.booleans())
    return st.lists(death, max_size=4).map(tuple)


# a session over a faulty link, between models that agree as often as they like
RUNS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32 - 1),
    "config": configs(),
    "link": links(),
    "deaths": deaths(),
    "acceptance": st.floats(0, 1),
    "end_every": st.sampled_from([0, 6, 30]),
}


@settings(max_examples=300, deadline=None)
@given(
    **RUNS,
    max_tokens=st.integers(1, 40),
)
def test_committed_ids_are_the_targets_own_whatever_the_link_does(
    seed: int,
    config: SessionConfig,
    link: LinkModel,
    deaths: tuple[Death, ...],
    acceptance: float,
    end_every: int,
    max_tokens: int,
) -> None:
    outcome, expected = run(
        seed,
        config,
        link,
        max_tokens=max_tokens,
        acceptance=acceptance,
        end_every=end_every,
        deaths=deaths,
    )
    assert outcome.ids == expected
    ended = bool(end_every) and expected[-1] == END
    assert outcome.finish.reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert 0 <= outcome.metrics.accepted <= outcome.metrics.drafted
    assert outcome.metrics.committed == len(expected)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    proposals=st.lists(st.tuples(st.integers(0, 10), st.floats(0, 1)), min_size=1, max_size=50),
    config=configs(),
    link=links(),
)
def test_committed_ids_are_the_targets_own_whatever_the_draft_proposes(
    seed: int, proposals: list[tuple[int, float]], config: SessionConfig, link: LinkModel
) -> None:
    target = toy_target(seed, end_every=12)
    stop_ids = frozenset({END})
    outcome = simulate(
        new_session(PROMPT, max_tokens=30, config=config, stop_ids=stop_ids),
        PROMPT,
        verifier=new_verifier,
        pair=FunctionPair(target, lambda ids: proposals[len(ids) % len(proposals)]),
        link=link,
        costs=Costs(draft_ms=3, verify_ms=20),
        rng=np.random.default_rng(seed),
    )
    assert outcome.ids == target_alone(target, PROMPT, 30, stop_ids)


def test_two_thousand_random_runs_differ_nowhere() -> None:
    """The issue's figure: 0 differences over 2,000 random runs with the scripted pair."""
    differences = 0
    for seed in range(2_000):
        rng = np.random.default_rng(seed)
        draft_len = int(rng.integers(1, 9))
        config = SessionConfig(
            trigger=FixedTrigger(draft_len),
            max_window=int(rng.integers(draft_len, 20)),
            max_navs_in_flight=int(rng.integers(1, 6)),
            draft_while_waiting=bool(rng.integers(2)),
            resend_after_ms=float(rng.uniform(30, 300)),
            give_up_after_ms=1e9,
            drafter_timeout_ms=1e6,
        )
        link = flaky(
            one_way_ms=float(rng.uniform(0, 80)),
            jitter_ms=float(rng.choice([0.0, 10.0, 50.0])),
            loss=float(rng.choice([0.0, 0.05, 0.3])),
            duplication=float(rng.choice([0.0, 0.2])),
        )
        deaths = tuple(
            Death(float(rng.uniform(0, 1500)), bool(rng.integers(2)))
            for _ in range(rng.integers(0, 3))
        )
        outcome, expected = run(
            seed, config, link, acceptance=float(rng.random()), end_every=25, deaths=deaths
        )
        differences += outcome.ids != expected
    assert differences == 0


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    jitter_ms=st.sampled_from([0.0, 5.0, 20.0]),
    navs=st.integers(1, 6),
    window=st.integers(4, 16),
    batch_len=st.none() | st.integers(1, 4),
)
def test_without_loss_no_run_waits_for_a_resend(
    seed: int, jitter_ms: float, navs: int, window: int, batch_len: int | None
) -> None:
    """Reordering alone never costs a timeout: Open overtaken, gaps, early verdicts."""
    config = SessionConfig(
        trigger=FixedTrigger(4),
        max_window=window,
        max_navs_in_flight=navs,
        draft_while_waiting=True,
        batch_len=batch_len,
        resend_after_ms=60_000,
        drafter_timeout_ms=1e9,
    )
    link = flaky(one_way_ms=20, jitter_ms=jitter_ms, duplication=0.1)
    outcome, expected = run(seed, config, link, acceptance=0.8)
    assert outcome.ids == expected
    assert outcome.elapsed_ms < 60_000


def test_a_perfect_link_and_drafter_need_one_round_per_batch_and_its_bonus() -> None:
    config = SessionConfig(trigger=FixedTrigger(4), max_window=4)
    outcome, expected = run(1, config, flaky(), acceptance=1.0)
    assert outcome.ids == expected
    assert outcome.metrics.rounds == 8  # 40 tokens, 4 drafts and a bonus each
    assert outcome.metrics.acceptance_rate == 1.0
    assert outcome.metrics.resends == 0


def test_drafts_made_while_waiting_are_kept_when_the_bonus_agrees() -> None:
    """Sliding window, perfect drafter: every token is an accepted draft, no drafting stalls."""
    config = SessionConfig(
        trigger=FixedTrigger(2), max_window=24, max_navs_in_flight=8, draft_while_waiting=True
    )
    outcome, expected = run(2, config, flaky(one_way_ms=50), acceptance=1.0)
    assert outcome.ids == expected
    assert outcome.metrics.rollbacks == 0
    # drafting never waits: 39 drafts of 10 ms, then the last NAV's way there, forward and way back
    assert outcome.elapsed_ms <= 39 * 10 + 50 + 2 * 17 + 50


def test_navs_of_one_session_that_wait_at_the_verifier_share_a_forward() -> None:
    config = SessionConfig(
        trigger=FixedTrigger(1), max_window=30, max_navs_in_flight=30, draft_while_waiting=True
    )
    costs = Costs(draft_ms=5, verify_ms=50)
    outcome, expected = run(3, config, flaky(one_way_ms=1), acceptance=1.0, costs=costs)
    assert outcome.ids == expected
    assert outcome.metrics.navs >= 30
    assert outcome.forwards < outcome.metrics.navs / 4


def test_speculation_off_asks_once_and_the_verifier_decodes_to_the_end() -> None:
    config = SessionConfig(speculate=False)
    outcome, expected = run(4, config, flaky())
    assert outcome.ids == expected
    assert outcome.metrics.navs == 1
    assert outcome.metrics.drafted == 0
    assert outcome.metrics.acceptance_rate is None
