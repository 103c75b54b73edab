"""Penalties, bias, min_tokens, ignored end ids and logprobs, with and without speculation.

The oracle scores every id by the definitions in plain floats and dicts; of the code under test it
shares the toy target's logits and the noise only. Ids are compared exactly: the two differ in
rounding, so a tie within 1e-6 could tell them apart, but every seed here is fixed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from deployments import driver
from deployments.driver import GenerationRequest
from deployments.engines.scripted import END_ID, ToyModel
from deployments.link import message_bytes
from policies.events import Emit, Finish
from policies.metrics import SessionMetrics
from policies.sampling import LEAST_LOGPROB, gumbel
from policies.session import SessionConfig
from policies.trigger import FixedTrigger
from policies.types import (
    Batch,
    Close,
    FinishReason,
    Ids,
    Open,
    Origin,
    Pick,
    SamplingParams,
    TokenLogprobs,
    Verdict,
)
from tests.deployments.pair import PROMPT, Pair
from tests.deployments.test_driver import DyingVerifier

CONFIGS = {f"k{k}": SessionConfig(trigger=FixedTrigger(k), max_window=k) for k in (1, 4, 8)}
CONFIGS["window"] = SessionConfig(
    trigger=FixedTrigger(2), max_window=12, max_navs_in_flight=4, draft_while_waiting=True
)
CONFIGS["off"] = SessionConfig(speculate=False)
SPECULATIVE = [name for name in CONFIGS if name != "off"]
END = frozenset({END_ID})
A_LETTER = ord("q")
SAMPLINGS = {
    "greedy": SamplingParams(stop_ids=END, logprobs=3),
    "t0.8": SamplingParams(0.8, seed=5, stop_ids=END, logprobs=3),
    "top_k1": SamplingParams(0.7, top_k=1, seed=6, stop_ids=END, logprobs=3),
}
FEATURES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.8},
    "ban": {"logit_bias": ((A_LETTER, -100.0), (ord("e"), -100.0), (999, 5.0))},
    "force": {"logit_bias": ((A_LETTER, 100.0), (3, 100.0))},
    "min_tokens": {"min_tokens": 30},
    "ignore_eos": {"stop_ids": frozenset()},
    "all": {
        "presence_penalty": 0.8,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": ((A_LETTER, 3.0), (A_LETTER, 1.0)),
        "min_tokens": 30,
    },
}


@dataclass
class Answer:
    ids: Ids
    origins: list[Origin]
    logprobs: list[TokenLogprobs | None]
    finish: Finish
    metrics: SessionMetrics


async def ask(
    pair: Pair, sampling: SamplingParams, config: SessionConfig, max_tokens: int = 40
) -> Answer:
    if pair.driver.models is None:
        await pair.driver.start()
    generation = pair.driver.open(GenerationRequest(PROMPT, sampling, max_tokens, config))
    ids: list[int] = []
    origins: list[Origin] = []
    logprobs: list[TokenLogprobs | None] = []
    async with aclosing(generation.stream()) as stream:
        async for item in stream:
            if isinstance(item, Emit):
                assert len(item.logprobs) == (0 if sampling.logprobs is None else len(item.ids))
                ids += item.ids
                origins += item.origins
                logprobs += item.logprobs
    assert isinstance(item, Finish)
    return Answer(tuple(ids), origins, logprobs, item, generation.metrics)


def finite_logits(model: ToyModel, ids: list[int]) -> dict[int, float]:
    return {i: x for i, x in enumerate(model.logits(ids).tolist()) if x > -math.inf}


def score(token_id: int, logit: float, s: SamplingParams, prompt: Ids, generated: Ids) -> float:
    if token_id in prompt or token_id in generated:
        logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
    times = generated.count(token_id)
    logit -= s.presence_penalty * (times > 0) + s.frequency_penalty * times
    return logit + sum(bias for biased_id, bias in s.logit_bias if biased_id == token_id)


def entry(logits: dict[int, float], token_id: int, count: int) -> TokenLogprobs:
    total = math.log(math.fsum(math.exp(x) for x in logits.values()))
    best = sorted(logits, key=lambda i: (-logits[i], i))[:count]
    return TokenLogprobs(
        max(logits.get(token_id, -math.inf) - total, LEAST_LOGPROB),
        tuple((i, logits[i] - total) for i in best),
    )


def oracle(
    model: ToyModel, s: SamplingParams, max_tokens: int = 40
) -> tuple[Ids, list[TokenLogprobs]]:
    """What the target alone writes after PROMPT, and the log-softmax of its own logits."""
    ids, entries = list(PROMPT), []
    while len(ids) < len(PROMPT) + max_tokens:
        logits = finite_logits(model, ids)
        generated = tuple(ids[len(PROMPT) :])
        scores = {i: score(i, x, s, PROMPT, generated) for i, x in logits.items()}
        if len(generated) < s.min_tokens:
            scores = {i: x for i, x in scores.items() if i not in s.stop_ids}
        if s.top_k:
            ranked = sorted(scores, key=lambda i: (-scores[i], i))
            scores = {i: scores[i] for i in ranked[: s.top_k]}
        if s.temperature:
            noise = gumbel(s.seed, len(ids), np.arange(END_ID + 1)).tolist()
            scores = {i: x + s.temperature * noise[i] for i, x in scores.items()}
        ids.append(min(scores, key=lambda i: (-scores[i], i)))
        entries.append(entry(logits, ids[-1], s.logprobs or 0))
        if ids[-1] in s.stop_ids:
            break
    return tuple(ids[len(PROMPT) :]), entries


def assert_close(got: list[TokenLogprobs | None], expected: list[TokenLogprobs]) -> None:
    assert len(got) == len(expected)
    for entry_, expected_ in zip(got, expected, strict=True):
        assert entry_ is not None
        assert [i for i, _ in entry_.top] == [i for i, _ in expected_.top]
        values, wanted = ([e.logprob, *(x for _, x in e.top)] for e in (entry_, expected_))
        assert values == pytest.approx(wanted, abs=1e-5)


def a_pair(feature: str, agreement: float = 0.8) -> Pair:
    """Its target writes an end id now and then where the feature is about end ids."""
    ends = feature in ("min_tokens", "ignore_eos", "all")
    return Pair(agreement=agreement, end_every=6 if ends else 0)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("feature", FEATURES)
async def test_ids_and_logprobs_are_the_oracles(feature: str, sampling: str, config: str) -> None:
    """C25 and C26: whatever the method, one entry per id, accepted, recovered or bonus."""
    pair = a_pair(feature)
    asked = replace(SAMPLINGS[sampling], **FEATURES[feature])
    answer = await ask(pair, asked, CONFIGS[config])
    ids, entries = oracle(pair.target, asked)
    assert answer.ids == ids
    assert_close(answer.logprobs, entries)
    if config != "off":
        assert answer.metrics.accepted > 0
    await pair.assert_nothing_is_left()


@pytest.mark.parametrize("config", SPECULATIVE)
@pytest.mark.parametrize("sampling", ["greedy", "t0.8"])
@pytest.mark.parametrize("feature", FEATURES)
async def test_a_drafter_with_the_targets_logits_is_accepted_always(
    feature: str, sampling: str, config: str
) -> None:
    """It applies the same penalties, bias and bans, its own window's drafts counted."""
    asked = replace(SAMPLINGS[sampling], **FEATURES[feature])
    answer = await ask(a_pair(feature, agreement=1.0), asked, CONFIGS[config])
    assert answer.metrics.accepted > 0
    assert answer.metrics.rollbacks == 0
    assert Origin.RECOVERED not in answer.origins
    if END_ID not in answer.ids:  # else the drafter had credit past the end
        assert answer.metrics.accepted == answer.metrics.drafted


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampling", ["greedy", "t0.8"])
async def test_a_banned_first_token_is_nowhere_and_a_forced_one_everywhere(
    sampling: str, config: str
) -> None:
    """C25: not only where the target decodes by itself."""
    asked = SAMPLINGS[sampling]
    (first, *_), _ = oracle(Pair().target, SamplingParams(), 1)
    banned = replace(asked, logit_bias=((first, -100.0),))
    forced = replace(asked, logit_bias=((first, 100.0),))
    assert first not in (await ask(Pair(), banned, CONFIGS[config], 60)).ids
    answer = await ask(Pair(), forced, CONFIGS[config], 60)
    assert answer.ids == (first,) * 60
    assert len({entry.logprob for entry in answer.logprobs if entry}) > 30  # raw, not all 0


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("feature", ["ban", "all"])
@pytest.mark.parametrize("deaths", [[1], [3], [2, 1, 2]])
async def test_ids_and_logprobs_are_the_oracles_after_the_verifier_was_lost(
    feature: str, config: str, deaths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C26 and C32: the next verifier counts the ids that the lost one had verified."""
    pair = a_pair(feature)
    monkeypatch.setattr(driver, "_RECONNECT_S", (0.0,))
    monkeypatch.setattr("tests.deployments.test_driver.Pair", partial(a_pair, feature))
    dying = DyingVerifier(pair, list(deaths))
    pair.driver._verifier = dying
    asked = replace(SAMPLINGS["t0.8"], **FEATURES[feature])
    answer = await ask(pair, asked, CONFIGS[config])
    ids, entries = oracle(pair.target, asked)
    assert answer.ids == ids
    assert_close(answer.logprobs, entries)
    assert dying.reopened


def proposes(pair: Pair, token_id: int) -> None:
    """From now on the drafter proposes nothing else."""
    feed = pair.draft_engine.feed

    async def stubborn(session: str, position: int, ids: Ids) -> list[Pick]:
        return [Pick(token_id, c.confidence) for c in await feed(session, position, ids)]

    pair.draft_engine.feed = stubborn  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("config", SPECULATIVE)
@pytest.mark.parametrize("token_id", [END_ID, 300, A_LETTER])
async def test_no_proposal_of_a_stubborn_drafter_gets_past_min_tokens_or_a_ban(
    token_id: int, config: str
) -> None:
    """A stop id proposed too early, an id past the logits row, a banned id."""
    pair = Pair(end_every=6)
    asked = replace(
        SAMPLINGS["t0.8"],
        min_tokens=20,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias=((A_LETTER, -100.0),),
    )
    await pair.driver.start()
    proposes(pair, token_id)
    answer = await ask(pair, asked, CONFIGS[config])
    ids, entries = oracle(pair.target, asked)
    assert answer.ids == ids
    assert answer.finish.reason is FinishReason.STOP
    assert len(ids) > 20
    assert_close(answer.logprobs, entries)


async def test_all_three_origins_carry_entries_and_none_is_there_unasked() -> None:
    asked = replace(SAMPLINGS["greedy"], stop_ids=frozenset())
    answer = await ask(Pair(), asked, CONFIGS["k4"], 200)
    assert set(answer.origins) == set(Origin)
    assert None not in answer.logprobs
    assert (await ask(Pair(), replace(asked, logprobs=None), CONFIGS["k4"])).logprobs == []


class Weighing:
    """A verifier link that adds up the sizes of what passes."""

    def __init__(self, pair: Pair) -> None:
        self._verifier = pair.verifier
        self.describe = pair.verifier.describe
        self.up = self.down = 0

    async def open(self, opening: Open) -> AsyncGenerator[Verdict, None]:
        self.up += message_bytes(opening)
        async with aclosing(self._verifier.open(opening)) as stream:
            async for verdict in stream:
                self.down += message_bytes(verdict)
                yield verdict

    async def push(self, batch: Batch) -> Verdict | None:
        self.up += message_bytes(batch)
        return await self._verifier.push(batch)

    async def close(self, message: Close) -> None:
        await self._verifier.close(message)


@pytest.mark.parametrize("config", CONFIGS)
async def test_the_bytes_of_open_batches_and_verdicts_are_counted(config: str) -> None:
    pair = Pair()
    weighing = Weighing(pair)
    pair.driver._verifier = weighing
    answer = await ask(pair, SAMPLINGS["greedy"], CONFIGS[config])
    await pair.driver.drain()
    assert answer.metrics.uplink_bytes == weighing.up
    assert answer.metrics.downlink_bytes == weighing.down
    plain = await ask(Pair(), replace(SAMPLINGS["greedy"], logprobs=None), CONFIGS[config])
    assert 0 < plain.metrics.downlink_bytes < answer.metrics.downlink_bytes
