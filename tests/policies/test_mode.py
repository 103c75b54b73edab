"""Cloud-only or collaborative: never much worse than the better one, whatever the surroundings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from policies.controller import Controller, Learned
from policies.costs import Costs
from policies.crossover import Mode, Objective
from policies.methods import METHODS, Method
from policies.mode import MAX_STRETCH, MIN_STRETCH, PROBE_EVERY, PROBE_TOKENS, ModeChooser
from policies.simulate import Outcome
from tests.policies.test_controller import run
from tests.policies.toy import flaky

AUTO, OUTRIDER, CLOUD_ONLY = (METHODS[name] for name in ("auto", "outrider", "cloud-only"))
WARM_UP, MEASURED = 4, 4  # sessions
TOKENS = 200


def sessions(
    learned: Learned, costs: Costs, acceptance: float, rtt_ms: float, count: int, *, first: int = 0
) -> list[Outcome]:
    """Each is checked against the target alone by `run`."""
    link = flaky(one_way_ms=rtt_ms / 2)
    return [
        run(learned, seed=seed, acceptance=acceptance, link=link, costs=costs, max_tokens=TOKENS)
        for seed in range(first, first + count)
    ]


def mode(learned: Learned) -> Mode:
    assert learned.modes is not None
    assert learned.modes.decision is not None
    return learned.modes.decision.mode


def elapsed_ms(outcomes: list[Outcome]) -> float:
    return sum(outcome.elapsed_ms for outcome in outcomes)


@pytest.mark.parametrize(
    ("rtt_ms", "draft_ms", "verify_ms", "acceptance"),
    list(product((5.0, 50.0, 300.0), (10.0, 36.0), (30.0, 100.0), (0.6, 0.9))),
)
def test_auto_is_at_most_5_percent_worse_than_the_better_mode(
    rtt_ms: float, draft_ms: float, verify_ms: float, acceptance: float
) -> None:
    """Probes included, after a warm-up and with the same seeds."""
    costs = Costs(draft_ms, verify_ms)
    took_ms = {}
    for method in (AUTO, OUTRIDER, CLOUD_ONLY):
        learned = Learned(method)
        sessions(learned, costs, acceptance, rtt_ms, WARM_UP if method is not CLOUD_ONLY else 0)
        took_ms[method] = elapsed_ms(
            sessions(learned, costs, acceptance, rtt_ms, MEASURED, first=WARM_UP)
        )
    assert took_ms[AUTO] <= 1.05 * min(took_ms[OUTRIDER], took_ms[CLOUD_ONLY])


@pytest.mark.parametrize("objective", ["latency", "cost", 0.0, 0.5, 5.0])
@pytest.mark.parametrize("acceptance", [0.1, 0.8])
def test_the_mode_is_the_better_one_by_the_objective_or_within_6_percent_of_it(
    objective: Objective, acceptance: float
) -> None:
    """A forward grows with its ids, so drafts that fall cost the verifier too."""
    costs = Costs(draft_ms=36.0, verify_ms=15.0, verify_ms_per_token=15.0)
    scores = {}
    for played, method in ((Mode.COLLABORATIVE, OUTRIDER), (Mode.CLOUD_ONLY, CLOUD_ONLY)):
        outcomes = sessions(Learned(method), costs, acceptance, 50.0, WARM_UP)
        tpt_ms = elapsed_ms(outcomes) / (WARM_UP * TOKENS)
        verifier_ms = sum(outcome.metrics.verify_ms for outcome in outcomes) / (WARM_UP * TOKENS)
        match objective:
            case "latency":
                scores[played] = tpt_ms
            case "cost":
                scores[played] = verifier_ms
            case price:
                scores[played] = tpt_ms + float(price) * verifier_ms
    learned = Learned(replace(AUTO, objective=objective))
    sessions(learned, costs, acceptance, 50.0, 6)
    assert scores[mode(learned)] <= 1.06 * min(scores.values())


def test_a_price_of_verifier_time_moves_the_choice() -> None:
    """At 0 the time alone counts, which cloud-only needs less of; at 10 the verifier's does."""
    chosen = {}
    for price in (0.0, 10.0):
        learned = Learned(replace(AUTO, objective=price))
        sessions(learned, Costs(10.0, 30.0), 0.6, 50.0, 6)
        chosen[price] = mode(learned)
    assert chosen == {0.0: Mode.CLOUD_ONLY, 10.0: Mode.COLLABORATIVE}


def test_drafting_is_taken_up_again_when_the_verifier_becomes_slow() -> None:
    learned = Learned(AUTO)
    before = sessions(learned, Costs(36.0, 30.0), 0.9, 50.0, 6)
    assert mode(learned) is Mode.CLOUD_ONLY
    assert before[-1].metrics.drafted == 0
    after = sessions(learned, Costs(36.0, 100.0), 0.9, 50.0, 3)
    assert mode(learned) is Mode.COLLABORATIVE
    assert after[-1].metrics.accepted > 0.6 * TOKENS


def test_drafting_ends_when_the_drafts_fall() -> None:
    learned = Learned(AUTO)
    sessions(learned, Costs(10.0, 30.0), 0.9, 50.0, 5)
    assert mode(learned) is Mode.COLLABORATIVE
    after = sessions(learned, Costs(10.0, 30.0), 0.2, 50.0, 2)
    assert mode(learned) is Mode.CLOUD_ONLY
    assert after[-1].metrics.drafted == 0


def test_drafting_is_taken_up_again_when_drafts_stand_again() -> None:
    """Probes find it out, the first after PROBE_EVERY tokens or so."""
    learned = Learned(AUTO)
    sessions(learned, Costs(10.0, 30.0), 0.4, 5.0, 5)
    assert mode(learned) is Mode.CLOUD_ONLY
    sessions(learned, Costs(10.0, 30.0), 0.97, 5.0, 5 * PROBE_EVERY // TOKENS)
    assert mode(learned) is Mode.COLLABORATIVE


@pytest.mark.parametrize("name", ["vanilla", "pipesd", "edgellm"])
def test_every_drafting_method_may_have_an_objective(name: str) -> None:
    """A forward over many ids is dear here, which a method of one length never sees of one id."""
    learned = Learned(replace(METHODS[name], objective="latency"))
    last = sessions(learned, Costs(36.0, 10.0, 30.0), 0.5, 50.0, 2 + 2 * PROBE_EVERY // TOKENS)[-1]
    assert mode(learned) is Mode.CLOUD_ONLY
    assert last.metrics.bonus > 0.6 * TOKENS


def test_a_stretch_is_so_long_that_its_round_trip_is_a_hundredth() -> None:
    learned = Learned(AUTO)
    sessions(learned, Costs(36.0, 30.0), 0.6, 60.0, 3)
    assert Controller(learned).plan().decode_on == pytest.approx(100 * 60.0 / 30.0, rel=0.02)
    assert MIN_STRETCH < 200 < MAX_STRETCH


def test_probes_are_rare_and_short() -> None:
    """In 8 probing intervals of a settled session: that many, of their length and a window."""
    learned = Learned(AUTO)
    costs = Costs(36.0, 30.0)
    sessions(learned, costs, 0.9, 5.0, 5)
    assert mode(learned) is Mode.CLOUD_ONLY
    outcomes = sessions(learned, costs, 0.9, 5.0, 8 * PROBE_EVERY // TOKENS, first=5)
    drafted = sum(outcome.metrics.drafted for outcome in outcomes)
    assert 0 < drafted < 8 * (PROBE_TOKENS[Mode.COLLABORATIVE] + 2 * AUTO.max_window)


def test_nothing_but_drafting_before_the_environment_is_known() -> None:
    chooser = ModeChooser("latency", max_navs_in_flight=1, max_window=8, nav_bytes=100.0)
    for _ in range(1_000):
        chooser.judged(False)
        chooser.observe(Mode.COLLABORATIVE, 1, 50.0, 30.0)
        assert chooser.decode_on(lambda: None) == 0
    assert chooser.decision is None


def test_without_an_objective_a_session_always_drafts() -> None:
    learned = Learned(OUTRIDER)
    outcomes = sessions(learned, Costs(36.0, 1.0), 0.1, 300.0, 4)
    assert learned.modes is None
    assert all(outcome.metrics.drafted > 0 for outcome in outcomes)
    assert Controller(learned).plan().decode_on == 0


@pytest.mark.parametrize(
    ("base", "objective"),
    [
        ("ucb", "latency"),
        ("greedy", 1.0),
        ("cloud-only", "cost"),
        ("outrider", -1.0),
        ("outrider", float("nan")),
        ("outrider", "speed"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(base: str, objective: Objective) -> None:
    with pytest.raises(ValueError, match="objective"):
        replace(METHODS[base], objective=objective)
    assert isinstance(METHODS[base], Method)
