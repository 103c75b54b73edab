"""The endpoint benchmark's arithmetic and its comparison, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.bench.comparison import EPSILON, Comparison, compare, is_near_tie
from serve_app.bench.figures import Quartiles, figures, quartiles, speedup, summary, table
from serve_app.bench.measure import Pair, Run, measure
from serve_app.client import EndpointError, Report, connect
from tests.serve_app.fake_endpoint import (
    END,
    URL,
    FakeEndpoint,
    best,
    error,
    ids_of,
    install,
    report,
    written,
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEndpoint:
    fake = FakeEndpoint()
    install(fake, monkeypatch)
    return fake


def measured(
    fake: FakeEndpoint, *prompts: str, max_tokens: int = 7, chat: bool = False
) -> list[Pair]:
    outcomes = list(measure(connect(URL), chat, prompts, max_tokens, fake.clock))
    pairs = [outcome for outcome in outcomes if isinstance(outcome, Pair)]
    assert len(pairs) == len(outcomes)
    return pairs


def run(num_tokens: int = 10, lasted_ms: float = 100.0, **given: Any) -> Run:
    ttft_ms, itl_ms = given.pop("ttft_ms", 10.0), given.pop("itl_ms", ())
    ids = tuple(range(1, num_tokens + 1))
    return Run((1,), ids, ttft_ms, lasted_ms, itl_ms, Report.model_validate(report(**given)))


# ---- times


def test_times_are_of_tokens_whatever_the_chunks(fake: FakeEndpoint) -> None:
    (pair,) = measured(fake, "hello")
    # seven tokens: one a chunk alone, three a chunk with speculation; 200 ms, then 100 ms a chunk
    assert (len(pair.off.ids), len(pair.speculative.ids)) == (7, 7)
    assert pair.off.ttft_ms == pytest.approx(200)
    assert pair.off.tpt_ms == pytest.approx(800 / 7)
    assert pair.off.tpot_ms == pytest.approx(600 / 6)
    assert pair.off.itl_ms == pytest.approx([100] * 6)
    assert pair.speculative.ttft_ms == pytest.approx(200)
    assert pair.speculative.tpt_ms == pytest.approx(400 / 7)
    assert pair.speculative.tpot_ms == pytest.approx(200 / 6)
    assert pair.speculative.itl_ms == pytest.approx([100, 100])
    assert speedup([pair]).median == pytest.approx(2.0)


def test_a_single_token_has_no_time_between_tokens(fake: FakeEndpoint) -> None:
    (pair,) = measured(fake, "hello", max_tokens=1)
    assert pair.off.tpot_ms is None
    result = summary([pair])
    assert (result["tpot_ms"], result["itl_p95_ms"], result["tokens"]) == (None, None, 1)
    assert table([pair])


def test_methods_take_turns_to_go_first_after_a_warm_up_of_each(fake: FakeEndpoint) -> None:
    assert len(measured(fake, "one", "two", "three")) == 3
    off, speculative = "off", "speculative"
    warm_up = [off, speculative]
    turns = [off, speculative, speculative, off, off, speculative]
    assert fake.methods == [*warm_up, *turns]


def test_requests_are_greedy_and_of_the_given_length(fake: FakeEndpoint) -> None:
    measured(fake, "hello")
    streamed = [body for body in fake.requests if body.get("stream")]
    assert {(body["temperature"], body["max_tokens"]) for body in streamed} == {(0, 7)}
    assert {body["path"] for body in streamed} == {"/v1/completions"}


def test_a_question_goes_to_the_chat_endpoint_as_a_users_message(fake: FakeEndpoint) -> None:
    (pair,) = measured(fake, "hello", chat=True)
    assert {body["path"] for body in fake.requests} == {"/v1/chat/completions"}
    assert fake.requests[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert pair.comparison == Comparison(identical=7)


def test_a_prompt_that_fails_is_told_and_the_others_are_measured(fake: FakeEndpoint) -> None:
    fake.fail = lambda body: error(400, "too long") if body["prompt"] == "long" else None
    outcomes = list(measure(connect(URL), False, ["long", "one"], 7, fake.clock))
    assert isinstance(outcomes[0], EndpointError)
    assert isinstance(outcomes[1], Pair)


# ---- figures


def test_rates_are_ratios_of_sums() -> None:
    first = run(
        num_tokens=9,
        drafted=8,
        accepted=6,
        recovered=1,
        bonus=2,
        navs=3,
        accepted_at=[3, 2, 1],
        judged_at=[3, 3, 2],
        uplink_bytes=100,
        downlink_bytes=50,
    )
    second = run(
        num_tokens=1,
        drafted=2,
        accepted=0,
        recovered=1,
        bonus=0,
        navs=1,
        accepted_at=[0],
        judged_at=[1],
        uplink_bytes=30,
        downlink_bytes=20,
    )
    row = figures([first, second])
    assert row.acceptance_rate == 6 / 10
    assert row.acceptance_len == 10 / 4
    assert row.acceptance_by_position == (3 / 4, 2 / 3, 1 / 2)
    assert row.navs_per_token == 4 / 10
    assert row.bytes_per_token == 200 / 10


def test_without_drafts_and_navs_there_are_no_rates() -> None:
    row = figures([run(mode="off")])
    rates = (row.acceptance_rate, row.acceptance_len, row.acceptance_by_position)
    assert rates == (None, None, ())


def test_a_position_that_no_nav_judged_has_no_rate() -> None:
    row = figures([run(accepted_at=[0, 1], judged_at=[0, 2])])
    assert row.acceptance_by_position == (None, 0.5)


def test_times_are_medians_over_requests() -> None:
    runs = [run(num_tokens=10, lasted_ms=lasted, ttft_ms=10.0) for lasted in (100, 200, 1000)]
    row = figures(runs)
    assert row.tpt_ms == Quartiles(15.0, 20.0, 60.0)
    assert row.tpot_ms is not None
    assert row.tpot_ms.median == pytest.approx(190 / 9)


def test_the_itl_is_the_95th_percentile_over_the_gaps_of_all_requests() -> None:
    first, second = (
        tuple(float(gap) for gap in range(41)),
        tuple(float(gap) for gap in range(41, 101)),
    )
    assert figures([run(itl_ms=first), run(itl_ms=second)]).itl_p95_ms == pytest.approx(95.0)


def test_the_quartiles_of_one_value_are_that_value() -> None:
    assert quartiles([3.0]) == Quartiles(3.0, 3.0, 3.0)


def test_the_speedup_is_the_median_of_the_prompts_own_ratios() -> None:
    pairs = [
        Pair(run(lasted_ms=off), run(lasted_ms=speculative), Comparison())
        for off, speculative in ((100, 50), (100, 100), (900, 300))
    ]
    assert speedup(pairs) == Quartiles(1.5, 2.0, 2.5)
    assert summary(pairs)["speedup_quartiles"] == [1.5, 2.5]


def test_degraded_requests_are_counted() -> None:
    pairs = [
        Pair(run(mode="off"), run(mode=mode), Comparison()) for mode in ("degraded", "speculative")
    ]
    assert summary(pairs)["degraded"] == 1


# ---- the comparison


def judged(fake: FakeEndpoint, max_tokens: int = 7) -> tuple[Comparison, Sequence[int], list[int]]:
    """The comparison, the ids it judged and those of the prompt."""
    (pair,) = measured(fake, "hello", max_tokens=max_tokens)
    return pair.comparison, pair.speculative.ids, ids_of("hello")


def test_the_targets_own_tokens_are_identical_without_another_request(fake: FakeEndpoint) -> None:
    assert judged(fake)[0] == Comparison(identical=7)
    assert all(body["stream"] for body in fake.requests)


def second_best_at(*positions: int) -> Any:
    """Emits, at these positions after `hello`, the id next to the target's best."""

    def emit(ids: Sequence[int]) -> int:
        wanted = len(ids) - len("hello") in positions
        return 1 + best(ids) % 29 if wanted else best(ids)

    return emit


@pytest.mark.parametrize(
    ("gap", "result"),
    [
        (0.9, Comparison(identical=6, near_ties=1)),
        (1.1, Comparison(identical=6, mismatches=1)),
    ],
)
def test_a_difference_is_a_near_tie_below_one_logit(
    fake: FakeEndpoint, gap: float, result: Comparison
) -> None:
    fake.gap, fake.emit = gap, second_best_at(2)
    comparison, ids, prompt_ids = judged(fake)
    assert comparison == result
    top, after = [body for body in fake.requests if not body.get("stream")]
    assert (top["prompt"], top["max_tokens"], top["logprobs"]) == ([*prompt_ids, *ids[:2]], 1, 5)
    assert (after["prompt"], after["max_tokens"]) == ([*prompt_ids, *ids[:3]], 4)
    for body in (top, after):
        assert body["temperature"] == 0
        assert body["outrider"] == {"method": "off", "tokens": True}


def test_an_id_that_is_not_among_the_targets_best_is_a_mismatch(fake: FakeEndpoint) -> None:
    fake.gap = 0.1
    fake.emit = lambda ids: 1 + (best(ids) + 10) % 29 if len(ids) == 7 else best(ids)
    assert judged(fake)[0] == Comparison(identical=6, mismatches=1)


def test_the_comparison_goes_on_after_every_difference(fake: FakeEndpoint) -> None:
    fake.gap, fake.emit = 0.5, second_best_at(0, 3, 4, 6)
    assert judged(fake)[0] == Comparison(identical=3, near_ties=4)


def test_a_difference_in_the_last_token_asks_for_no_continuation(fake: FakeEndpoint) -> None:
    fake.gap, fake.emit = 0.5, second_best_at(6)
    assert judged(fake)[0] == Comparison(identical=6, near_ties=1)
    assert len([body for body in fake.requests if not body.get("stream")]) == 1


def test_an_end_token_is_a_token_and_is_compared(fake: FakeEndpoint) -> None:
    fake.emit = lambda ids: END if len(ids) == 8 else best(ids)
    comparison, ids, _ = judged(fake)
    assert ids[-1] == END
    assert comparison == Comparison(identical=3, mismatches=1)


class Toy:
    """The target alone, in this process."""

    def target_ids(self, prompt_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        return written(prompt_ids, max_tokens)

    def target_top(self, prompt_ids: Sequence[int]) -> dict[int, float]:
        own = best(prompt_ids)
        return {own: 0.0, 1 + own % 29: -EPSILON / 2}


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_judged_given_what_was_emitted_before_it(seed: int) -> None:
    rng = random.Random(seed)
    prompt, emitted = [3, 1, 4], []
    expected = Comparison()
    for _ in range(rng.randrange(1, 30)):
        own = best([*prompt, *emitted])
        kind = rng.choices(("same", "near", "wrong"), (4, 1, 1))[0]
        emitted.append({"same": own, "near": 1 + own % 29, "wrong": 1 + (own + 1) % 29}[kind])
        expected += Comparison(kind == "same", kind == "near", kind == "wrong")
    assert compare(Toy(), prompt, emitted, written(prompt, 30)) == expected
    assert expected.compared == len(emitted)


def test_where_the_target_alone_had_ended_the_rest_is_judged_too() -> None:
    ids = written([1], 4)
    assert compare(Toy(), [1], ids, ids[:2]).compared == 4


def test_a_gap_of_one_logit_is_no_near_tie() -> None:
    assert is_near_tie({1: -0.25, 2: -1.0}, 2)
    assert not is_near_tie({1: -0.25, 2: -1.25}, 2)
    assert not is_near_tie({1: -0.25}, 2)
