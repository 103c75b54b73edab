"""Replaying a trace: sessions meet what was recorded, at the simulated times."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from policies.costs import IDS_ONLY, Costs, Wire
from policies.links import LinkModel, Phase
from policies.methods import METHODS, Method
from policies.player import Figures, Player, check_answer, play_together
from policies.replay import RenewalPair, ReplayPair, clairvoyant_ms
from policies.scenarios import LLAMA, QWEN, SCENARIOS, Scenario, edge
from policies.simulate import SharedVerifier, Timeline, run
from policies.traces import ROLLOUT_LEN
from tests.policies.traces import END, prompt_trace, toy_trace

RTT50 = edge(36.0, 50.0, mbit=(math.inf,))


def play(method: Method, agrees: list[bool], scenario: Scenario = RTT50) -> Figures:
    return Player(scenario, method).play([ReplayPair(prompt_trace(agrees))])


# ---- the pair


def test_the_draft_model_says_what_was_recorded_on_the_path_and_off_it() -> None:
    trace = prompt_trace([True, False, True, True])
    pair = ReplayPair(trace)
    ids = list(pair.prompt)
    first = pair.draft(ids, 0)
    assert (first.id, first.confidence) == (int(trace.target_ids[0]), pytest.approx(0.9))
    ids.append(first.id)
    wrong = pair.draft(ids, 1)
    assert wrong.id == int(trace.draft_ids[1, 0]) != int(trace.target_ids[1])
    ids.append(wrong.id)
    for step in range(ROLLOUT_LEN + 3):
        drafted = pair.draft(ids, 2 + step)
        recorded = trace.rollouts[0, min(step, ROLLOUT_LEN - 1)]
        assert (drafted.confidence, drafted.entropy) == tuple(recorded.tolist())
        ids.append(drafted.id)
    ids[len(pair.prompt) + 1 :] = [int(trace.target_ids[1])]  # the session rewinds the drafter
    assert pair.draft(ids, 0).id == int(trace.target_ids[2])


def test_the_target_says_its_own_answer_and_stops_where_the_drafts_leave_it() -> None:
    pair = ReplayPair(prompt_trace([True, False, True, True]))
    prompt, answer = list(pair.prompt), list(pair.answer)
    assert pair.target_ids([*prompt, *answer[:3]], len(prompt) - 1) == answer
    assert pair.target_ids([*prompt, answer[0], 7, 7], len(prompt) - 1) == answer[:2]
    assert pair.target_ids([*prompt, *answer[:2]], len(prompt) + 1) == [answer[2]]


# ---- times, by hand


def test_one_nav_at_a_time_takes_drafts_and_a_round_trip_each() -> None:
    """8 tokens, all right, k = 3: two rounds of 3 drafts and a bonus."""
    figures = play(Method(draft_len=3), [True] * 8)
    assert figures.ms == pytest.approx(2 * (3 * 36.0 + 50.0 + 30.0))
    assert (figures.tokens, figures.navs, figures.verified) == (8, 2, 8)


def test_cloud_only_pays_the_round_trip_once() -> None:
    figures = play(METHODS["cloud-only"], [True] * 10)
    assert figures.ms == pytest.approx(50.0 + 10 * 30.0)
    assert (figures.navs, figures.verified) == (10, 10)


def test_a_nav_on_every_draft_reaches_the_clairvoyant_bound_if_all_are_right() -> None:
    figures = play(METHODS["outrider-p0"], [True] * 40)
    bound_ms = clairvoyant_ms(frozenset(), 40, draft_ms=36.0, rtt_ms=50.0, verify_ms=30.0)
    assert figures.ms == pytest.approx(bound_ms) == pytest.approx(39 * 36.0 + 80.0)


def test_a_mistake_costs_the_round_trip_and_no_draft_step_behind_it() -> None:
    """The step that is under way when the verdict comes is broken off; the last one is right."""
    figures = play(METHODS["outrider-p0"], [*[True] * 10, False, *[True] * 10])
    bound_ms = clairvoyant_ms(frozenset({10}), 21, draft_ms=36.0, rtt_ms=50.0, verify_ms=30.0)
    assert figures.ms == pytest.approx(bound_ms) == pytest.approx(19 * 36.0 + 2 * 80.0)


def test_whole_distributions_occupy_the_uplink() -> None:
    """Two drafts of 1,000 bytes in one message at 10 bytes per ms, and 96 bytes besides."""
    wire = Wire(draft_bytes=1_000.0)
    link = LinkModel((Phase(25.0, bytes_per_ms=10.0),))
    scenario = replace(RTT50, uplink=link, wire=wire)
    figures = play(Method(draft_len=2), [True] * 3, scenario)
    assert figures.ms == pytest.approx(2 * 36.0 + 209.6 + 50.0 + 30.0)
    assert figures.uplink_bytes == 2_096


@pytest.mark.parametrize("name", METHODS)
def test_no_method_that_drafts_is_faster_than_the_bound(name: str) -> None:
    """Cloud-only decoding and the k = 0 arm draft nothing, so the bound is none for them."""
    trace = toy_trace(prompts=4, length=48, acceptance=0.85)
    method = METHODS[name]
    dear = edge(
        36.0, 50.0, verify_ms=200.0, mbit=(math.inf,)
    )  # dear enough that decoding alone never pays
    pairs = [ReplayPair(prompt) for prompt in trace.of("toy", "evaluate")]
    figures = Player(dear, method).play(pairs, frozenset({END}))
    bound_ms = sum(
        clairvoyant_ms(p.mistakes, p.max_tokens, draft_ms=36.0, rtt_ms=50.0, verify_ms=200.0)
        for p in pairs
    )
    assert figures.ms >= bound_ms - 1e-6 or figures.metrics.accepted == 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_plays_to_the_targets_own_answers(name: str) -> None:
    """`Player` checks every answer."""
    scenario = SCENARIOS[name]
    rng = np.random.default_rng(0)
    for method in ("pipesd", "outrider", "ucb"):
        pairs = (
            [ReplayPair(p) for p in toy_trace(prompts=2).of("toy", "tune")]
            if scenario.rates is None
            else [RenewalPair(scenario.rates, rng.random(32).tolist()) for _ in range(2)]
        )
        assert Player(scenario, METHODS[method]).play(pairs).tokens == sum(
            pair.max_tokens for pair in pairs
        )


def test_the_same_run_gives_the_same_figures() -> None:
    runs = [play(METHODS["pipesd"], [True, False, True, True] * 10) for _ in range(2)]
    assert runs[0] == runs[1]


# ---- several clients


def test_the_schedule_learns_the_link_though_its_navs_wait_for_earlier_batches() -> None:
    """Requests of whole distributions, one after the other: 25 ms and 0.0004 ms a byte each."""
    player = Player(SCENARIOS["laptop"], METHODS["pipesd-fixed"])
    player.play([ReplayPair(prompt) for prompt in toy_trace(length=64).prompts])
    assert player.learned.environment is not None
    link = player.learned.environment.link
    assert (link.overhead_ms, link.ms_per_byte) == pytest.approx((25.0, 0.0004))


def test_requests_that_wait_share_a_forward() -> None:
    """Of three that ask at once the first has a forward, and the others wait for theirs."""
    timeline = Timeline()
    verifier = SharedVerifier(timeline, Costs(verify_ms=30.0, verify_ms_per_token=1.0))
    done: list[tuple[int, float, float]] = []
    for number, num_ids in enumerate((4, 2, 3)):
        verifier.ask(num_ids, lambda ms, n=number: done.append((n, ms, timeline.now_ms)))  # type: ignore[misc]
    while timeline.step():
        pass
    assert done == [(0, 34.0, 34.0), (1, 35.0, 69.0), (2, 35.0, 69.0)]
    assert (verifier.forwards, verifier.busy_ms) == (2, 69.0)
    assert verifier.waited_ms == [0.0, 34.0, 34.0]


def test_clients_on_one_verifier_have_their_own_answers() -> None:
    player = Player(RTT50, METHODS["outrider"])
    pairs = [ReplayPair(prompt_trace([True, True, False] * 9, seed=seed)) for seed in range(6)]
    clients = [player.request(pair) for pair in pairs]
    for client in clients:
        client.start()
    run(clients, player.timeline, [player.learned])
    for client, pair in zip(clients, pairs, strict=True):
        check_answer(client, pair)
    assert player.verifier.forwards < sum(client.checks for client in clients)


def together(num_players: int) -> tuple[list[Player], list[list[ReplayPair]]]:
    timeline = Timeline()
    verifier = SharedVerifier(timeline, RTT50.verify, prefill_ms=0.0)
    players = [
        Player(RTT50, Method(draft_len=3), timeline=timeline, verifier=verifier)
        for _ in range(num_players)
    ]
    lists = [
        [ReplayPair(prompt_trace([True, True, False] * 4, seed=seed)) for seed in range(2)]
        for _ in players
    ]
    return players, lists


def test_one_client_is_as_fast_together_as_alone() -> None:
    players, lists = together(1)
    alone = Player(RTT50, Method(draft_len=3)).play(together(1)[1][0])
    assert play_together(players, lists) == [alone]


def test_clients_at_once_wait_for_each_other_and_have_all_their_requests() -> None:
    """One waits for the forward that is under way, of 30 ms, and for no more."""
    (alone,) = play_together(*together(1))
    players, lists = together(3)
    for figures in (all_figures := play_together(players, lists)):
        assert figures.tokens == alone.tokens == 24
        assert alone.ms <= figures.ms <= alone.ms + 30.0 * figures.navs
    assert sum(figures.ms for figures in all_figures) > 3 * alone.ms
    assert max(players[0].verifier.waited_ms) == 30.0


def test_players_apart_are_not_played_together() -> None:
    apart = [Player(RTT50, Method()) for _ in range(2)]
    with pytest.raises(ValueError, match="share timeline and verifier"):
        play_together(apart, [[], []])


# ---- synthetic pairs and the published suites


def test_a_synthetic_draft_falls_by_its_place_since_the_target_was_heard() -> None:
    pair = RenewalPair((0.2, 0.9), [0.1, 0.5, 0.5, 0.95, 0.95])
    ids = list(pair.prompt)
    right = [pair.draft([*ids, *[1] * at], since).id == 1 for at, since in ((0, 0), (1, 0), (1, 1))]
    assert right == [True, False, True]
    assert pair.mistakes == {3, 4}


def test_a_synthetic_draft_is_as_sure_as_its_rate_to_triggers_of_either_kind() -> None:
    """SpecDec++'s trigger reads exp(-entropy): with none it would never fire on these drafts."""
    pair = RenewalPair((0.2, 0.0), [0.1, 0.5])
    for since_rewind, rate in enumerate((0.2, 0.0)):
        pick = pair.draft(pair.prompt, since_rewind)
        assert pick.confidence == rate
        assert math.exp(-pick.entropy) == pytest.approx(rate, abs=1e-8)
    unsure = Player(QWEN.scenario(0.0), replace(METHODS["specdecpp"], rejection_threshold=0.5))
    figures = unsure.play([RenewalPair(QWEN.rates(), [0.1] * 8)])
    assert len(figures.metrics.judged_at) == 1  # q̂(1) = 0.46: one draft is doubtful enough


def test_the_published_suites_have_the_published_figures() -> None:
    """Tables I and II of UCB-SpecStop, at the lengths they give."""
    for suite in (QWEN, LLAMA):
        drafts = np.cumsum(suite.draft_ms())
        for length, ms in suite.draft_ms_per_token.items():
            assert drafts[length - 1] == pytest.approx(length * ms)
        stand = np.cumprod(suite.rates())
        for length, probability in suite.prefix.items():
            assert stand[length - 1] == pytest.approx(probability)
        verify = suite.verify()
        for length, ms in suite.verify_ms_per_token.items():
            line_ms = verify.verify_ms + verify.verify_ms_per_token * (length + 1)
            assert line_ms == pytest.approx((length + 1) * ms, rel=0.03)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_ms": ()}, "draft_ms"),
        ({"draft_ms": (math.nan,)}, "draft_ms"),
        ({"verify": Costs(verify_ms=0.0)}, "verify_ms"),
        ({"rates": (1.5,)}, "rates"),
        ({"rates": ()}, "rates"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(RTT50, **fields)


def test_ids_only_is_the_wire_of_the_product() -> None:
    assert RTT50.wire == IDS_ONLY
