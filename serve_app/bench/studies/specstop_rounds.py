"""Rounds of UCB-SpecStop in the simulator: who chooses their lengths, and what each came to.

The suites are the published ones, with acceptance by position or geometric, and the trace's data
sets at a laptop's draft time. The delays of the tables are injected beside a base round trip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Protocol

import numpy as np

from policies.bandit import UcbSpecStop
from policies.control import Answered, RoundEnded
from policies.controller import Learned
from policies.lengths import Planned
from policies.methods import Method
from policies.player import AnyPair, Player
from policies.replay import RenewalPair, ReplayPair
from policies.scenarios import LAPTOP_MS, LLAMA, QWEN, Scenario, SpecStopSuite, edge
from policies.traces import PromptTrace, Split, Trace
from serve_app.bench.trials import SPLITS, SYNTHETIC_PROMPTS, SYNTHETIC_TOKENS

DELAYS_MS = (0.0, 5.0, 20.0, 40.0, 55.0, 83.0, 111.0, 150.0)  # injected, one way (Table III)
ARMS = (1, 2, 3, 5, 7, 10)
MAX_DRAFT_LEN = 10
TRACE_RTT_MS = 10.0

_BY_ROUNDS = Method(draft_len=MAX_DRAFT_LEN, learner="ucb")


@dataclass(frozen=True, slots=True)
class Suite:
    """A pair of models with its times: the published measurements, or prompts of a trace."""

    name: str
    model: SpecStopSuite | None
    geometric: bool = False
    prompts: tuple[PromptTrace, ...] = ()
    end_ids: frozenset[int] = frozenset()

    def at(self, one_way_ms: float) -> Scenario:
        """The suite at an injected delay."""
        if self.model is None:
            return edge(LAPTOP_MS, TRACE_RTT_MS + 2.0 * one_way_ms)
        return self.model.scenario(one_way_ms, geometric=self.geometric)

    def pairs(self, split: Split, seed: int) -> list[AnyPair]:
        """What all strategies meet alike: the same luck, or the same prompts in the same order."""
        rng = np.random.default_rng((SPLITS.index(split), seed))
        rates = self.at(0.0).rates
        if rates is not None:
            luck = rng.random((SYNTHETIC_PROMPTS, SYNTHETIC_TOKENS)).tolist()
            return [RenewalPair(rates, each) for each in luck]
        own = [prompt for prompt in self.prompts if prompt.split == split]
        return [ReplayPair(own[i]) for i in rng.permutation(len(own))]


def suites(trace: Trace) -> list[Suite]:
    """Both published suites, each with both kinds of acceptance, and the trace's data sets."""
    published = [
        Suite(f"{name}{' geometric' if geometric else ''}", model, geometric)
        for name, model in (("Qwen", QWEN), ("LLaMA", LLAMA))
        for geometric in (False, True)
    ]
    return published + [
        Suite(
            name,
            None,
            prompts=trace.of(name, "tune") + trace.of(name, "evaluate"),
            end_ids=trace.end_ids,
        )
        for name in trace.datasets
    ]


class Policy(Protocol):
    """Chooses the length of a round in a state of the network, and learns what came of it."""

    def select(self, state: int, /) -> int: ...

    def update(self, state: int, draft_len: int, round_ms: float, committed: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class PerState:
    """A draft length for each state of the network."""

    draft_lens: tuple[int, ...]

    def select(self, state: int, /) -> int:
        return self.draft_lens[state]

    def update(self, state: int, draft_len: int, round_ms: float, committed: int, /) -> None:
        """It learns nothing."""


@dataclass(frozen=True, slots=True)
class Blind:
    """A bandit that knows nothing of the network's state."""

    choose: Callable[[], int]
    learn: Callable[[int, float, int], None]

    def select(self, state: int, /) -> int:
        return self.choose()

    def update(self, state: int, draft_len: int, round_ms: float, committed: int, /) -> None:
        self.learn(draft_len, round_ms, committed)


def fixed(draft_len: int) -> Policy:
    """The same length in every round."""
    return PerState((draft_len,))


def ucb(draft_lens: tuple[int, ...] = ARMS, exploration: float = 0.5) -> Policy:
    """UCB-SpecStop as in the paper: nothing is forgotten."""
    bandit = UcbSpecStop(draft_lens, exploration, discount=1.0)
    return Blind(bandit.select, bandit.update)


@dataclass(frozen=True, slots=True)
class Round:
    """One round, and of it the time from the NAV to its verdict, and the verifier's."""

    draft_len: int
    ms: float
    committed: int
    answer_ms: float
    verify_ms: float
    state: int


class Rounds(Learned):
    """Has a policy choose the lengths, and keeps the rounds that no answer's end cut short."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(_BY_ROUNDS)
        self.played: list[Round] = []
        self.ended = 0  # the cut ones too
        self.state_now: Callable[[], int] = lambda: 0
        self._policy = policy
        self._answer: Answered | None = None

    def next_round(self) -> Planned:
        state = self.state_now()
        return Planned(self._policy.select(state), state)

    def answered(self, answered: Answered) -> None:
        self._answer = answered

    def round_ended(self, ended: RoundEnded, planned: Planned | None) -> None:
        self.ended += 1
        answer, self._answer = self._answer, None
        if planned is None or planned.draft_len != ended.draft_len or answer is None:
            return
        state, length = planned.network_state, planned.draft_len
        self._policy.update(state, length, ended.ms, ended.committed)
        self.played.append(
            Round(length, ended.ms, ended.committed, answer.ms, answer.verify_ms, state)
        )


def player(scenario: Scenario, policy: Policy) -> tuple[Player, Rounds]:
    """A node whose rounds are of the policy's lengths, and the rounds it will have played."""
    node, rounds = Player(scenario, _BY_ROUNDS), Rounds(policy)
    node.learned = rounds
    return node, rounds


def play(
    suite: Suite, one_way_ms: float, policy: Policy, count: int, split: Split, seed: int
) -> list[Round]:
    """So many rounds at one delay, by the split's prompts in turn."""
    node, rounds = player(suite.at(one_way_ms), policy)
    return play_on(suite, node, rounds, count, split, seed)


def play_on(
    suite: Suite, node: Player, rounds: Rounds, count: int, split: Split, seed: int
) -> list[Round]:
    """So many rounds on that node."""
    turn = 0
    while len(rounds.played) < count:
        # every turn of the prompts has luck of its own
        for pair in suite.pairs(split, seed * 1000 + turn):
            node.play([pair], suite.end_ids)
            if len(rounds.played) >= count:
                break
        turn += 1
    return rounds.played[:count]


def cost_ms(rounds: Sequence[Round]) -> float:
    """Per committed token, the ratio of sums."""
    return sum(r.ms for r in rounds) / sum(r.committed for r in rounds)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Mean and standard deviation over seeds."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def on_all_cores(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The function of each job's arguments, in their order."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, *zip(*jobs, strict=True)))
