"""Records what a pair of models writes: the target's answers, and the draft model's view of them.

Several prompts go through a model side by side, one sequence each, since a forward of eight tokens
hardly takes longer than one of one. What each prompt needs is a script: a generator that asks for
ids to be fed and gets their logits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from deployments.engines.llama_context import LlamaContext, Logits, Row
from policies.traces import ROLLOUT_LEN, TOP, PromptTrace, Split
from policies.types import Ids

CHUNK = 32  # ids of one prompt in one forward, at most

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Feed:
    """Hold these ids from `position` on, and nothing after them; `logits_from` is an index."""

    position: int
    ids: Sequence[int]
    logits_from: int = 0


# what it gets are the logits after each id from `logits_from` on, valid until it asks again
Script = Generator[Feed, list[Logits], _Result]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids and where it comes from."""

    dataset: str
    split: Split
    index: int
    ids: Ids


def record(
    draft: LlamaContext,
    target: LlamaContext,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    width: int,
) -> Iterator[PromptTrace]:
    """The traces of the prompts, in order, `width` of them at a time.

    Both contexts must have room for `width` sequences, for the longest prompt with `max_tokens`
    and a roll-out behind it, and for width · CHUNK ids in a forward. EngineError if one has not.
    """
    for first in range(0, len(prompts), width):
        group = prompts[first : first + width]
        answers = side_by_side(
            target, [_answer(prompt.ids, max_tokens, target.end_ids) for prompt in group]
        )
        pairs = zip(group, answers, strict=True)
        yield from side_by_side(draft, [_judge(prompt, answer) for prompt, answer in pairs])


def side_by_side(context: LlamaContext, scripts: Sequence[Script[_Result]]) -> list[_Result]:
    """Run all scripts to their ends, each in a sequence of its own; what they return."""
    results: dict[int, _Result] = {}
    waiting: dict[int, Feed] = {}

    def step(number: int, logits: list[Logits] | None) -> None:
        script = scripts[number]
        try:
            waiting[number] = next(script) if logits is None else script.send(logits)
        except StopIteration as stop:
            results[number] = stop.value
            context.clear(number)

    for number in range(len(scripts)):
        context.clear(number)
        step(number, None)
    while waiting:
        feeds, waiting = waiting, {}
        rows: list[Row] = []
        wanted: dict[int, list[int]] = {}
        for number, feed in feeds.items():
            context.remove(number, feed.position)
            for index, token_id in enumerate(feed.ids):
                wants_logits = index >= feed.logits_from
                if wants_logits:
                    wanted.setdefault(number, []).append(len(rows))
                rows.append(Row(token_id, feed.position + index, number, wants_logits))
        context.forward(rows)
        for number in feeds:
            step(number, [context.logits(row) for row in wanted.get(number, ())])
    return [results[number] for number in range(len(scripts))]


def _answer(prompt: Ids, max_tokens: int, end_ids: frozenset[int]) -> Script[list[int]]:
    """The target's own greedy answer."""
    for at in range(0, len(prompt) - 1, CHUNK):
        chunk = prompt[at : min(at + CHUNK, len(prompt) - 1)]
        yield Feed(at, chunk, logits_from=len(chunk))
    ids = [*prompt]
    while len(ids) < len(prompt) + max_tokens:
        (logits,) = yield Feed(len(ids) - 1, ids[-1:])
        ids.append(int(logits.argmax()))
        if ids[-1] in end_ids:
            break
    return ids[len(prompt) :]


def _judge(prompt: Prompt, answer: Sequence[int]) -> Script[PromptTrace]:
    """What the draft model makes of the answer: along it, then from its mismatches.

    From the last mismatch back to the first, the KV before each is that of the target's own text.
    """
    ids = [*prompt.ids, *answer]
    first = len(prompt.ids) - 1  # the id after which the answer's first token is predicted
    views: list[_View] = []
    for at in range(0, len(ids) - 1, CHUNK):
        chunk = ids[at : min(at + CHUNK, len(ids) - 1)]
        logits = yield Feed(at, chunk, logits_from=min(max(0, first - at), len(chunk)))
        views += [_view(values) for values in logits]
    rollouts = []
    missed = [index for index, view in enumerate(views) if view.top[0] != answer[index]]
    for index in reversed(missed):
        rollout = []
        token_id = views[index].top[0]
        for step in range(ROLLOUT_LEN):
            (logits_after,) = yield Feed(len(prompt.ids) + index + step, [token_id])
            view = _view(logits_after)
            token_id = view.top[0]
            rollout.append((view.confidence, view.entropy))
        rollouts.append(rollout)
    return PromptTrace(
        prompt.dataset,
        prompt.split,
        prompt.index,
        len(prompt.ids),
        np.array(answer, np.int32),
        np.array([view.top for view in views], np.int32),
        np.array([view.confidence for view in views], np.float32),
        np.array([view.entropy for view in views], np.float32),
        np.array(rollouts[::-1], np.float32).reshape(-1, ROLLOUT_LEN, 2),
    )


@dataclass(frozen=True, slots=True)
class _View:
    top: tuple[int, ...]  # the TOP likeliest ids
    confidence: float
    entropy: float


def _view(logits: Logits) -> _View:
    few = np.argpartition(logits, -TOP)[-TOP:]
    top = few[np.lexsort((few, -logits[few]))]  # ties as argmax breaks them: the lowest id
    shifted = logits.astype(np.float64) - float(logits[top[0]])
    weights = np.exp(shifted)
    total = float(weights.sum())
    kept = weights > 0.0
    entropy = np.log(total) - float(weights[kept] @ shifted[kept]) / total
    return _View(tuple(top.tolist()), 1.0 / total, max(0.0, float(entropy)))
