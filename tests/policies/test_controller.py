"""Every method, through both halves of the protocol: exact, and doing what its paper says."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from policies.control import (
    Answered,
    Committed,
    DecodedOn,
    Drafted,
    Interrupted,
    Judged,
    NavSent,
    Plan,
    RoundEnded,
)
from policies.controller import DECODE_ON, EVALUATION_TOKENS, Controller, Learned
from policies.costs import Costs
from policies.lengths import BlindOrContextual, Planned
from policies.links import LinkModel
from policies.methods import METHODS, Method
from policies.simulate import Outcome, simulate
from policies.stopping import empirical_prefix
from policies.thresholds import Setting
from policies.trigger import (
    DraftSignal,
    DualThresholdTrigger,
    FixedTrigger,
    PriceTrigger,
)
from policies.types import Ids
from tests.policies.toy import (
    VOCAB,
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
FAR = flaky(one_way_ms=75.0)


def run(
    learned: Learned,
    *,
    seed: int = 1,
    acceptance: float = 0.8,
    telling: bool = True,
    link: LinkModel | None = None,
    costs: Costs | None = None,
    max_tokens: int = 200,
) -> Outcome:
    """One session under the method, checked against the target alone.

    The toy draft's confidence tells for sure whether it is right, or else only how likely.
    """
    rng = np.random.default_rng(seed)
    agreement = rng.random(10_000) < acceptance
    target = toy_target(seed)
    draft = toy_draft(target, lambda position: bool(agreement[position]))
    if not telling:
        draft = hesitant_draft(target, 1.0 - rng.random(10_000) ** 3, rng.random(10_000))
    outcome = simulate(
        new_session(
            PROMPT,
            max_tokens=max_tokens,
            config=learned.method.session_config(),
            control=Controller(learned),
        ),
        PROMPT,
        verifier=new_verifier,
        pair=FunctionPair(target, draft),
        link=link or flaky(one_way_ms=25.0),
        costs=costs or Costs(draft_ms=36.0, verify_ms=30.0),
        rng=rng,
        learned=learned,
    )
    assert outcome.ids == target_alone(target, PROMPT, max_tokens)
    return outcome


def hesitant_draft(
    target: TargetModel, confidences: NDArray[np.float64], luck: NDArray[np.float64]
) -> DraftModel:
    """Right with probability confidence^0.3 at each position."""

    def draft(ids: Sequence[int]) -> tuple[int, float]:
        confidence = float(confidences[len(ids)])
        wrong = bool(luck[len(ids)] > confidence**0.3)
        return (target(ids) + wrong) % VOCAB, confidence

    return draft


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0])
def test_every_method_writes_what_the_target_alone_would(name: str, acceptance: float) -> None:
    learned = Learned(METHODS[name])
    for seed in range(2):
        run(learned, seed=seed, acceptance=acceptance, max_tokens=100)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_stays_exact_on_a_link_that_loses_and_reorders(name: str) -> None:
    link = flaky(one_way_ms=20.0, jitter_ms=30.0, loss=0.1, duplication=0.1)
    learned = Learned(METHODS[name])
    for seed in range(3):
        run(learned, seed=seed, link=link, max_tokens=60)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_the_same_from_the_same(name: str) -> None:
    """No hidden clock or randomness: two runs agree to the last event."""
    figures = []
    for _ in range(2):
        learned = Learned(METHODS[name], seed=5)
        outcomes = [run(learned, seed=seed, max_tokens=100) for seed in range(2)]
        figures.append([(o.elapsed_ms, o.metrics.navs, o.metrics.drafted) for o in outcomes])
    assert figures[0] == figures[1]


# ---- the environment


def test_the_costs_of_the_simulation_are_found_again() -> None:
    learned = Learned(METHODS["vanilla"])
    costs = Costs(draft_ms=36.0, verify_ms=30.0)
    run(learned, link=flaky(one_way_ms=40.0), costs=costs)
    assert learned.environment is not None
    assert learned.environment.costs.draft_ms == pytest.approx(36.0)
    assert learned.environment.costs.verify_ms == pytest.approx(30.0)
    assert learned.environment.link.rtt_ms == pytest.approx(80.0)


def test_acceptances_are_calibrated_by_the_verdicts() -> None:
    """The toy draft is right at confidence 0.9 and wrong at 0.5, always."""
    learned = Learned(METHODS["outrider"])
    for seed in range(5):
        run(learned, seed=seed)
    assert learned.calibration.curve.at(0.9) > 0.95
    assert learned.calibration.curve.at(0.5) < 0.15


def test_navs_without_drafts_say_nothing_of_how_long_drafts_are() -> None:
    """N̂ is a mean over drafts; what asks the verifier to decode on has none."""
    learned = Learned(METHODS["pipesd"])
    controller = Controller(learned)
    for draft_len in (12, 0, 0, 12, 0):
        controller.observe(NavSent(draft_len))
    assert learned.window.num_tokens == 12


# ---- pipelines and windows


def test_pipesd_sends_drafts_ahead_of_their_nav_and_drafts_while_it_waits() -> None:
    """Rules 1 and 2 of §4; without the pipeline every message is a NAV."""
    pipesd, plain = (
        run(Learned(METHODS[name]), acceptance=0.97) for name in ("pipesd", "pipesd-no-pipeline")
    )
    assert pipesd.metrics.batches > 1.5 * pipesd.metrics.navs
    assert plain.metrics.batches == plain.metrics.navs
    assert pipesd.elapsed_ms < plain.elapsed_ms


def test_a_lower_price_buys_speed_with_navs() -> None:
    tpts, navs = [], []
    for price_ms in (0.0, 20.0, 80.0, 400.0):
        learned = Learned(
            Method(
                trigger="price",
                nav_price_ms=price_ms,
                draft_len=16,
                max_window=64,
                max_navs_in_flight=64,
                draft_while_waiting=True,
            )
        )
        outcomes = [run(learned, seed=seed, link=FAR) for seed in range(4)]
        tpts.append(sum(outcome.elapsed_ms for outcome in outcomes))
        navs.append(sum(outcome.metrics.navs for outcome in outcomes))
    assert tpts == sorted(tpts)
    assert navs == sorted(navs, reverse=True)
    assert navs[0] > 3 * navs[-1]


def test_the_sliding_window_beats_the_papers_methods_on_a_long_link() -> None:
    """With a target that is dear, or it would best decode alone."""
    totals = {}
    dear = Costs(draft_ms=36.0, verify_ms=100.0)
    for name in ("cloud-only", "vanilla", "hsl", "edgellm", "pipesd", "specdecpp", "outrider"):
        learned = Learned(METHODS[name])
        runs = [run(learned, seed=seed, link=FAR, costs=dear, telling=False) for seed in range(3)]
        totals[name] = sum(outcome.elapsed_ms for outcome in runs)
    assert min(totals, key=lambda name: totals[name]) == "outrider"


# ---- learners


def test_edgellm_moves_its_threshold() -> None:
    for acceptance, moved in ((1.0, -1), (0.0, 1)):
        learned = Learned(METHODS["edgellm"])
        run(learned, acceptance=acceptance)
        start = learned.method.sequence_threshold
        assert (learned.sequence_threshold - start) * moved > 0.0


@pytest.mark.parametrize("name", ["ucb", "naive-ucb", "ucb-contextual", "exp3"])
def test_a_bandit_tries_every_length_and_not_to_speculate_too(name: str) -> None:
    learned = Learned(METHODS[name])
    played: set[int] = set()
    assert learned.bandit is not None
    update = learned.bandit.update

    def watched(arm: int | Planned, round_ms: float, committed: int) -> None:
        played.add(arm.draft_len if isinstance(arm, Planned) else arm)
        update(arm, round_ms, committed)  # type: ignore[arg-type]

    learned.bandit.update = watched  # type: ignore[method-assign]
    for seed in range(6):
        run(learned, seed=seed)
    assert played >= set(range(learned.method.draft_len + 1))


def test_a_round_without_drafts_is_decoded_by_the_target() -> None:
    """Drafts that never stand: what pays is a verifier that goes on alone."""
    learned = Learned(METHODS["ucb"])
    for seed in range(4):
        last = run(learned, seed=seed, acceptance=0.0, max_tokens=400)
    assert last.metrics.bonus > 0.9 * last.metrics.committed
    assert last.metrics.navs < 2 * last.metrics.committed / DECODE_ON


def test_speculation_is_taken_up_again_when_it_pays() -> None:
    """C37: no permanent off. From drafts that never stand to drafts that nearly always do."""
    for name in ("ucb", "ucb-contextual"):
        learned = Learned(METHODS[name])
        near = flaky(one_way_ms=2.0)
        dear = Costs(draft_ms=5.0, verify_ms=60.0)
        for seed in range(4):
            run(learned, seed=seed, acceptance=0.0, costs=dear, link=near)
        for seed in range(16):
            last = run(learned, seed=seed, acceptance=0.95, costs=dear, link=near)
        assert last.metrics.accepted > 0.6 * last.metrics.committed, name


@pytest.mark.parametrize("name", ["greedy", "theory-oracle", "calibrated-oracle", "best-fixed"])
def test_an_oracle_drafts_further_over_a_longer_link(name: str) -> None:
    """Theorem 2; B2, which is blind for the delay, does not."""
    lens = []
    for one_way_ms in (1.0, 400.0):
        learned = Learned(METHODS[name])
        for seed in range(4):
            run(learned, seed=seed, link=flaky(one_way_ms=one_way_ms))
        lens.append(learned.next_round().draft_len)
    assert (lens[0] == lens[1]) if name == "greedy" else (lens[0] < lens[1])


def test_the_tuner_serves_each_proposal_for_one_evaluation() -> None:
    learned = Learned(METHODS["pipesd"])
    controller = Controller(learned)
    settings: list[Setting] = []
    for step in range(40 * EVALUATION_TOKENS):
        trigger = controller.plan().trigger
        assert isinstance(trigger, DualThresholdTrigger)
        setting = Setting(trigger.sequence_threshold, trigger.token_threshold)
        if not settings or setting != settings[-1]:
            settings.append(setting)
        tpt_ms = 50.0 + 40.0 * abs(setting.token_threshold - 0.8)
        controller.observe(Committed(1, step * tpt_ms))
        if learned.setting_due:
            learned.choose_setting()
    default = Setting(0.5, 0.5)
    assert settings[0] == default
    assert len(set(settings)) > 10
    assert abs(settings[-1].token_threshold - 0.8) < 0.15


def test_a_change_of_the_link_starts_the_search_anew() -> None:
    """PipeSD §4: thresholds that were best at 50 ms need not be at 200."""
    learned = Learned(METHODS["pipesd"])
    tuner = learned.tuner
    assert tuner is not None
    while tuner.tuning:
        tuner.tell(tuner.ask(), 100.0)
    learned.setting = tuner.best

    def answers(rtt_ms: float, count: int) -> None:
        for _ in range(count):
            learned.answered(Answered(rtt_ms + 30.0, 4, 5, 30.0, 4, 3, True))

    for _ in range(20):
        learned.monitor.observe_draft(36.0)
    answers(50.0, 64)
    assert (tuner.retunes, learned.setting_due) == (0, False)
    answers(200.0, 32)
    assert (tuner.retunes, learned.setting_due, tuner.tuning) == (1, True, True)
    assert learned.environment is not None
    assert learned.environment.link.rtt_ms == pytest.approx(200.0)


def test_the_tuner_is_told_only_of_time_under_its_own_setting() -> None:
    """Another session's plan of an older setting, a pause, a prefill: none of them is told."""
    learned = Learned(METHODS["pipesd"])
    assert learned.tuner is not None
    told: list[tuple[Setting, float | None]] = []
    tell = learned.tuner.tell

    def watched(setting: Setting, tpt_ms: float | None) -> None:
        told.append((setting, tpt_ms))
        tell(setting, tpt_ms)

    learned.tuner.tell = watched  # type: ignore[method-assign]
    older, newer = Controller(learned), Controller(learned)
    older.plan()
    learned.setting = learned.tuner.ask()._replace(token_threshold=0.7)
    newer.plan()
    for controller in (older, newer):
        controller.observe(Committed(1, 5_000.0))  # after the prefill
    for token in range(1, 60):
        older.observe(Committed(1, 5_000.0 + 900.0 * token))
    for token in range(1, EVALUATION_TOKENS // 2 + 1):
        newer.observe(Committed(1, 5_000.0 + 40.0 * token))
    newer.observe(Interrupted())
    assert told == []
    for token in range(EVALUATION_TOKENS // 2 + 1):  # the first one ends the pause
        newer.observe(Committed(1, 99_000.0 + 40.0 * token))
    assert told == [(learned.setting, pytest.approx(40.0))]


@pytest.mark.parametrize("name", ["vanilla", "pipesd", "outrider"])
def test_acceptances_by_position_are_those_of_the_drafts_that_were_judged(name: str) -> None:
    """Each at its place in its own NAV, as the session's own metrics count them."""
    learned = Learned(METHODS[name])
    metrics = run(learned, acceptance=0.6, max_tokens=35).metrics
    assert sum(metrics.judged_at) < 64  # so that none fades
    known = empirical_prefix(metrics.accepted_at, metrics.judged_at)
    prefix = learned.counts.prefix()
    assert prefix is not None
    assert prefix[: known.size] == pytest.approx(known)
    assert learned.counts.acceptance_rate == sum(metrics.accepted_at) / sum(metrics.judged_at)


def test_a_nav_that_is_answered_adds_to_no_position() -> None:
    """Of a NAV whose drafts were judged by earlier verdicts too, it tells nothing new."""
    learned = Learned(METHODS["vanilla"])
    controller = Controller(learned)
    controller.observe(Judged(DraftSignal(0.9), 0, True))
    controller.observe(Judged(DraftSignal(0.9), 1, False))
    controller.observe(NavSent(4))
    controller.observe(Answered(80.0, 4, 5, 30.0, 4, 3, True))
    prefix = learned.counts.prefix()
    assert prefix is not None
    assert prefix.tolist() == [1.0, 0.0, 0.0, 0.0]


# ---- rounds


def test_a_round_counts_for_the_network_state_that_its_own_session_was_in() -> None:
    """Two sessions at once: one began on a good link, and the other since then on a bad one."""
    learned = Learned(METHODS["ucb-contextual"])
    bandit = learned.bandit
    assert isinstance(bandit, BlindOrContextual)
    for rtt_ms in [5.0, 300.0] * 32:
        bandit.observe_rtt(rtt_ms, 100.0)
    began_good, began_bad = Controller(learned), Controller(learned)
    bandit.observe_rtt(5.0, 100.0)
    began_good.plan()
    bandit.observe_rtt(300.0, 100.0)
    began_bad.plan()
    # arm 0 is the first that is tried, in either state
    began_good.observe(RoundEnded(0, 80.0, DECODE_ON))
    began_bad.observe(RoundEnded(0, 900.0, DECODE_ON))
    by_state = bandit.state()["by_state"]
    assert isinstance(by_state, dict)
    assert [state["tallies"][0][1] for state in by_state["states"]] == [80.0, 900.0]


@pytest.mark.parametrize("name", ["ucb", "naive-ucb", "ucb-contextual", "exp3"])
def test_a_round_that_was_cut_short_is_no_round_of_an_arm(name: str) -> None:
    learned = Learned(METHODS[name])
    assert learned.bandit is not None
    controller = Controller(learned)
    planned = 0
    for _ in range(40):  # until some arm of two drafts or more is to be played
        plan = controller.plan()
        assert isinstance(plan.trigger, FixedTrigger)
        planned = 0 if plan.decode_on else plan.trigger.draft_len
        if planned >= 2:
            break
        controller.observe(RoundEnded(planned, 100.0, 1))
    assert planned >= 2
    before = learned.bandit.state()
    controller.observe(RoundEnded(planned - 1, 100.0, 1))
    assert learned.bandit.state() == before
    controller.observe(RoundEnded(planned, 100.0, 1))
    assert learned.bandit.state() != before


def test_rounds_of_a_session_that_are_cut_by_its_limit_are_told_to_no_arm() -> None:
    """All ten drafts fall, so that nine places before the limit the arm of ten is cut to nine."""
    learned = Learned(METHODS["ucb"])
    assert learned.bandit is not None
    told: list[int] = []
    learned.bandit.update = lambda draft_len, *_: told.append(draft_len)  # type: ignore
    learned.bandit.select = lambda: 10  # type: ignore[method-assign,assignment]
    outcome = run(learned, acceptance=0.0, max_tokens=30)
    assert set(told) == {10}
    assert outcome.metrics.navs > len(told) + 5


# ---- state


def test_what_is_learned_is_restored_from_json() -> None:
    for name in ("outrider", "ucb", "ucb-contextual", "exp3", "naive-ucb", "pipesd"):
        learned = Learned(METHODS[name])
        run(learned)
        again = Learned(METHODS[name])
        again.restore(json.loads(json.dumps(learned.state())))
        again.restore_calibration(json.loads(json.dumps(learned.calibration.state())))
        assert again.state() == learned.state()
        assert again.calibration.curve == learned.calibration.curve


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        None,
        {"kind": "learned"},
        {"kind": "learned", "bandit": None, "tuner": None},
        {"kind": "learned", "bandit": {}, "tuner": {}},
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(state: object) -> None:
    learned = Learned(METHODS["ucb"])
    run(learned)
    before = learned.state()
    with pytest.raises(ValueError, match=r"state|kind"):
        learned.restore(state)  # type: ignore[arg-type]
    assert learned.state() == before


def test_a_foreign_calibration_is_refused_and_changes_nothing() -> None:
    learned = Learned(METHODS["ucb"])
    run(learned)
    before = learned.calibration.state()
    with pytest.raises(ValueError, match="state"):
        learned.restore_calibration(learned.state())
    assert learned.calibration.state() == before


def test_two_clients_learn_nothing_from_each_other() -> None:
    """C37."""
    one, other = Learned(METHODS["ucb"]), Learned(METHODS["ucb"])
    before = other.state()
    run(one)
    assert other.state() == before


# ---- plans


def test_the_price_trigger_knows_the_measured_draft_time_and_curve() -> None:
    learned = Learned(METHODS["outrider"])
    run(learned, costs=Costs(draft_ms=10.0, verify_ms=30.0), max_tokens=400)
    trigger = Controller(learned).plan().trigger
    assert isinstance(trigger, PriceTrigger)
    assert trigger.draft_ms == pytest.approx(10.0)
    assert trigger.curve == learned.calibration.curve


def test_absurd_observations_change_no_plan() -> None:
    """A clock that jumps, a drafter whose confidence is no number."""
    nan = float("nan")
    absurd = [
        Drafted(nan),
        Drafted(-5.0),
        Answered(nan, 3, 4, nan, 3, 2, True),
        Answered(-1e9, 0, 1, 1e12, 0, 0, True),
        Judged(DraftSignal(nan), 0, True),
        RoundEnded(3, nan, 2),
        RoundEnded(3, -1.0, 9),
        NavSent(0),
        DecodedOn(nan, nan),
        DecodedOn(-1.0, 1e30),
        Committed(1, nan),
        Committed(1, -1e12),
    ]
    for name in METHODS:
        learned = Learned(METHODS[name])
        controller = Controller(learned)
        for observation in absurd * 40:
            controller.observe(observation)
            if learned.setting_due:
                learned.choose_setting()
            assert isinstance(controller.plan(), Plan)
        json.dumps(learned.state(), allow_nan=False)
        run(learned, max_tokens=60)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_len": 0}, "draft_len"),
        ({"draft_len": 20}, "draft_len"),
        ({"learner": "ucb", "draft_while_waiting": True}, "learner"),
        ({"learner": "exp3", "trigger": "dual"}, "learner"),
        ({"learner": "autotune"}, "trigger"),
        ({"learner": "autotune", "trigger": "dual", "token_threshold": 0.05}, "thresholds"),
        ({"trigger": "price", "nav_price_ms": float("inf")}, "nav_price_ms"),
        ({"learner": "dynamic-threshold", "trigger": "dual"}, "trigger"),
    ],
)
def test_a_method_that_cannot_be_is_refused(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Method(**fields)


def test_a_session_without_a_control_goes_by_its_configuration() -> None:
    config = METHODS["vanilla"].session_config()
    assert config.plan == Plan(FixedTrigger(4))
