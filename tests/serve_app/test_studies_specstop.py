"""UCB-SpecStop's rounds: what they pass on, and what their tables may claim."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from policies.contextual import ContextualUcb
from policies.scenarios import LLAMA, QWEN
from serve_app.bench.studies import specstop_rounds
from serve_app.bench.studies.specstop import specstop_transition
from serve_app.bench.studies.specstop_information import specstop_information, theory
from serve_app.bench.studies.specstop_links import LONG, PER_ROUND, node_at
from serve_app.bench.studies.specstop_regret import (
    BANDITS,
    EXPLORATIONS,
    Probe,
    assess,
    specstop_regret,
)
from serve_app.bench.studies.specstop_rounds import (
    ARMS,
    DELAYS_MS,
    MAX_DRAFT_LEN,
    PerState,
    Round,
    Suite,
    cost_ms,
    fixed,
    play,
    play_on,
    suites,
    ucb,
)
from serve_app.bench.studies.specstop_state import (
    Acceptance,
    BestLens,
    CalibratedState,
    MeasuredCosts,
    calibrate,
    measure_acceptance,
    measure_best,
    measure_costs,
)
from serve_app.bench.studies.specstop_strategies import (
    BEST_FIXED,
    CLOUD_ONLY,
    PAPER,
    specstop_strategies,
)
from tests.policies.traces import toy_trace

QWEN_SUITE = Suite("Qwen", QWEN)
EXACT = CalibratedState(
    "exact",
    MeasuredCosts((1, 10), (80.0, 80.0), (16.0, 32.0 / 11.0), rtt_ms=10.0),
    Acceptance(tuple((0.8 ** np.arange(1, 11)).tolist()), 0.8),
    BestLens((20.0,), (2,), (100.0,)),
)


# ---- rounds


def test_a_round_lasts_its_drafts_its_verification_and_its_round_trip() -> None:
    (first, *_) = play(QWEN_SUITE, 83.0, fixed(3), 5, "evaluate", 0)
    verify = QWEN.verify()
    verify_ms = verify.verify_ms + 4 * verify.verify_ms_per_token
    assert first.verify_ms == pytest.approx(verify_ms)
    assert first.answer_ms == pytest.approx(verify_ms + QWEN.base_rtt_ms + 2 * 83.0)
    assert first.ms == pytest.approx(first.answer_ms + sum(QWEN.draft_ms()[:3]))


def test_all_policies_meet_the_same_luck() -> None:
    """Whether the first draft of an answer stands does not depend on the length."""
    firsts = []
    for length in (1, 2):
        rounds = play(QWEN_SUITE, 0.0, fixed(length), 400, "evaluate", 3)
        firsts.append(rounds[0].committed > 1)
    assert firsts[0] == firsts[1]
    again = play(QWEN_SUITE, 0.0, fixed(2), 400, "evaluate", 3)
    assert again == rounds
    assert again != play(QWEN_SUITE, 0.0, fixed(2), 400, "evaluate", 4)


def test_a_bandit_learns_from_every_round_that_counts() -> None:
    played = play(QWEN_SUITE, 83.0, ucb(), 60, "evaluate", 0)
    assert len(played) == 60
    assert [r.draft_len for r in played[: len(ARMS)]] == list(ARMS)
    assert all(1 <= r.committed <= r.draft_len + 1 for r in played)


def test_the_arm_without_drafts_is_learned_from_too() -> None:
    """A forward takes 33 ms, a round with a draft in it 300 ms for two tokens at the most."""
    played = play(QWEN_SUITE, 83.0, ucb((0, *ARMS)), 60, "evaluate", 0)
    assert [r.draft_len for r in played[: len(ARMS) + 1]] == [0, *ARMS]
    assert Counter(r.draft_len for r in played).most_common(1)[0][0] == 0


def test_every_suite_has_pairs_on_both_splits() -> None:
    for suite in suites(toy_trace()):
        for split in ("tune", "evaluate"):
            assert suite.pairs(split, 0)  # type: ignore[arg-type]


# ---- the calibrated state


@pytest.mark.parametrize("suite", [QWEN_SUITE, Suite("LLaMA", LLAMA)], ids=lambda s: s.name)
def test_r1_and_r2_measure_what_the_suite_was_given(suite: Suite) -> None:
    """The prefix within 5 standard errors of each length: false alarm below 1e-5."""
    assert suite.model is not None
    state = measure_acceptance(suite, measure_costs(suite, 5), 600)
    costs = state.measured()
    drafts = np.cumsum(suite.model.draft_ms())
    for arm, ms in zip(costs.draft_lens, costs.draft_ms_per_token, strict=True):
        assert ms == pytest.approx(drafts[arm - 1] / arm)
    assert costs.rtt_ms == pytest.approx(suite.model.base_rtt_ms)
    given = np.cumprod(suite.model.rates()[:MAX_DRAFT_LEN])
    error = np.sqrt(given * (1.0 - given) / 600)
    assert (np.abs(state.prefix() - given) < 5.0 * error).all()


def test_the_best_length_of_r3_is_that_of_the_lowest_cost_and_never_falls_with_delay() -> None:
    """Of the same rounds at every delay, so Theorem 2 holds without noise."""
    state = calibrate(QWEN_SUITE, (0.0, 83.0, 300.0), rounds=(2, 20, 40))
    assert state.best is not None
    assert list(state.best.draft_lens) == sorted(state.best.draft_lens)
    own = cost_ms(play(QWEN_SUITE, 83.0, fixed(state.best_len(83.0)), 40, "tune", 0))
    assert state.best_cost_ms(83.0) == pytest.approx(own)
    assert own <= cost_ms(play(QWEN_SUITE, 83.0, fixed(10), 40, "tune", 0))


def test_a_state_survives_json() -> None:
    for state in (EXACT, replace(EXACT, best=None), CalibratedState("new")):
        assert CalibratedState.read(state.write()) == state


def test_a_round_refuses_to_begin_without_the_one_before() -> None:
    new = CalibratedState("new")
    with pytest.raises(ValueError, match="new lacks R1"):
        measure_acceptance(QWEN_SUITE, new, 1)
    with pytest.raises(ValueError, match="exact lacks R2"):
        measure_best(QWEN_SUITE, replace(EXACT, acceptance=None), 1)
    with pytest.raises(ValueError, match="exact lacks R3"):
        replace(EXACT, best=None).best_len(20.0)
    with pytest.raises(ValueError, match="one_way_ms 55"):
        EXACT.best_len(55.0)


def test_the_oracles_agree_where_their_models_do() -> None:
    """With a constant verification and a geometric curve B5 and B6 are one oracle."""
    for delay_ms in DELAYS_MS:
        assert EXACT.calibrated_len(delay_ms) == EXACT.empirical_len(delay_ms)
    assert EXACT.greedy_len() <= EXACT.empirical_len(0.0)


# ---- regret


def test_regret_is_the_sum_of_gaps_and_none_for_the_best_arm() -> None:
    probe = Probe(
        (100.0, 180.0, 300.0, 500.0, 700.0, 1000.0), (1.0, 2.0, 2.5, 3.0, 3.0, 3.0), (100.0,) * 6
    )
    assert probe.best_ms == 90.0
    best = [Round(2, 180.0, 2, 0.0, 0.0, 0)] * 20
    assert assess(best, probe).regret_ms == 0.0
    assert assess(best, probe).best_share == 1.0
    run = assess([Round(1, 100.0, 1, 0.0, 0.0, 0)] * 20, probe)
    assert run.regret_ms == pytest.approx(20 * (100.0 - 90.0))
    assert run.slope == pytest.approx(1.0)
    assert run.ratio_regret_ms == pytest.approx(20 * 10.0)


# ---- the network's state


def test_theory_gives_the_state_no_worth_by_rounds_and_some_by_time() -> None:
    known = theory(EXACT, (0.0, 400.0))
    assert known.state_lens[0] < known.state_lens[1]
    assert known.value_by_rounds == pytest.approx(0.0, abs=1e-12)
    assert known.value_of_state_lens_by_rounds <= 0.0
    assert known.value_by_time > 0.0


def test_a_round_is_over_the_link_of_the_state_it_knows() -> None:
    """Per round the state is that of the number, so all policies meet the same path."""
    paths = []
    for lens in ((1, 2), (3, 5)):
        node, rounds = node_at(QWEN_SUITE, (20.0, 111.0), PER_ROUND, PerState(lens), seed=1)
        played = play_on(QWEN_SUITE, node, rounds, 40, "evaluate", 0)
        for r in played:
            assert r.draft_len == lens[r.state]
            rtt_ms = QWEN.base_rtt_ms + 2.0 * (20.0, 111.0)[r.state]
            assert r.answer_ms - r.verify_ms == pytest.approx(rtt_ms)
        assert {r.state for r in played} == {0, 1}
        paths.append([r.state for r in played])
    assert paths[0] == paths[1]


def test_a_state_that_lasts_for_a_time_is_known_when_a_round_begins() -> None:
    policy = ContextualUcb(ARMS, 2)
    node, rounds = node_at(QWEN_SUITE, (20.0, 111.0), LONG, policy, seed=2)
    played = play_on(QWEN_SUITE, node, rounds, 400, "evaluate", 0)
    rtts_ms = [QWEN.base_rtt_ms + 2.0 * (20.0, 111.0)[r.state] for r in played]
    missed = sum(
        r.answer_ms - r.verify_ms != pytest.approx(rtt_ms)
        for r, rtt_ms in zip(played, rtts_ms, strict=True)
    )
    assert {r.state for r in played} == {0, 1}
    changes, at_ms = 0, 0.0
    while at_ms < node.timeline.now_ms:
        _, at_ms = node.uplink.phase(at_ms)
        changes += 1
    assert missed <= changes < len(played) // 10  # each within one round at most


# ---- the reports, on budgets too small to mean anything


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short synthetic prompt in each split."""
    monkeypatch.setattr(specstop_rounds, "SYNTHETIC_PROMPTS", 1)
    monkeypatch.setattr(specstop_rounds, "SYNTHETIC_TOKENS", 32)


@pytest.mark.usefixtures("small")
def test_the_transition_has_the_papers_rows_beside_ours() -> None:
    report = specstop_transition(toy_trace(), rounds=(2, 10, 4))
    costs, acceptance, transition, critical = report.tables
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [row[0] for row in critical.rows][-1] == "toy"
    assert sum(row[1] == "paper" for row in costs.rows) == 2
    assert sum(row[1] == "paper" for row in acceptance.rows) == 2
    assert sum("paper" in str(row[1]) for row in transition.rows) == 6
    states = [CalibratedState.read(json.dumps(each)) for each in report.figures["states"]]
    assert [state.suite for state in states] == [suite.name for suite in suites(toy_trace())]


@pytest.mark.usefixtures("small")
def test_the_strategies_have_their_baselines_in_the_same_run() -> None:
    report = specstop_strategies(toy_trace(), seeds=1, rounds=(2, 10, 2), delays_ms=(20.0,))
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
        names = {row[0] for row in table.rows}
        assert {*PAPER["Qwen"], CLOUD_ONLY, "outrider"} <= names
    for row in report.figures["rows"]:
        for run in row["tpt_ms"]:
            assert run[BEST_FIXED] <= run["fixed, 5"]


@pytest.mark.usefixtures("small")
def test_the_regret_has_every_bandit_and_every_exploration() -> None:
    report = specstop_regret(toy_trace(), rounds=20, seeds=2)
    regret, explorations = report.tables
    assert len(regret.rows) == 3 * len(BANDITS)
    assert [row[0] for row in explorations.rows] == list(EXPLORATIONS)
    assert len(report.figures["runs"]) == 2 * (3 * len(BANDITS) + len(EXPLORATIONS))
    assert report.json_line()


@pytest.mark.usefixtures("small")
def test_the_information_is_played_by_rounds_and_by_time() -> None:
    report = specstop_information(toy_trace(), rounds=20, seeds=2)
    known, played = report.tables
    for table in (known, played):
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert len(report.figures["rows"]) == 3 * 3 * 4
    assert report.json_line()
