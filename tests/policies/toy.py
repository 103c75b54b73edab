"""Toy models for protocol tests: functions of the whole prefix, so any lost or moved id shows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from policies.control import Control
from policies.links import LinkModel, Phase
from policies.session import DraftSession, SessionConfig
from policies.types import Ids, Pick, SamplingParams
from policies.verify_session import VerifySession

VOCAB = 11
END = 0

TargetModel = Callable[[Sequence[int]], int]
DraftModel = Callable[[Sequence[int]], tuple[int, float]]


class FunctionPair:
    """Two models that are functions of all ids before."""

    def __init__(self, target: TargetModel, draft: DraftModel) -> None:
        self._target, self._draft = target, draft

    def draft(self, ids: Sequence[int], _since_rewind: int) -> Pick:
        return Pick(*self._draft(ids))

    def target_ids(self, ids: Sequence[int], start: int) -> list[int]:
        return [self._target(ids[: at + 1]) for at in range(start, len(ids))]


def flaky(
    one_way_ms: float = 25.0,
    jitter_ms: float = 0.0,
    loss: float = 0.0,
    duplication: float = 0.0,
) -> LinkModel:
    """A link on which every message goes its own way, so that jitter reorders."""
    phase = Phase(one_way_ms, jitter_ms=jitter_ms)
    return LinkModel((phase,), in_order=False, loss=loss, duplication=duplication)


def toy_target(seed: int, *, end_every: int = 0) -> TargetModel:
    """The next id depends on every id before it. About one in `end_every` is END; 0: none."""

    def target(ids: Sequence[int]) -> int:
        digest = zlib.crc32(bytes(ids), seed)
        if end_every and digest % end_every == 0:
            return END
        return 1 + digest // 7 % (VOCAB - 1)

    return target


def toy_draft(target: TargetModel, agrees: Callable[[int], bool]) -> DraftModel:
    """Agrees with the target at the positions that `agrees` names, with a telling confidence."""

    def draft(ids: Sequence[int]) -> tuple[int, float]:
        token_id = target(ids)
        if agrees(len(ids)):
            return token_id, 0.9
        return (token_id + 1) % VOCAB, 0.5

    return draft


def target_alone(
    target: TargetModel, prompt: Ids, max_tokens: int, stop_ids: frozenset[int] = frozenset()
) -> Ids:
    """What the target writes with no drafter, no link and no protocol: the oracle."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(target(ids))
        if ids[-1] in stop_ids:
            break
    return tuple(ids[len(prompt) :])


def new_session(
    prompt: Ids,
    *,
    max_tokens: int,
    config: SessionConfig,
    stop_ids: frozenset[int] = frozenset(),
    draft_context: int = 10_000,
    target_context: int = 10_000,
    control: Control | None = None,
) -> DraftSession:
    return DraftSession(
        "s",
        prompt,
        sampling=SamplingParams(stop_ids=stop_ids),
        max_tokens=max_tokens,
        draft_context=draft_context,
        target_context=target_context,
        config=config,
        control=control,
    )


def new_verifier(max_window: int = 64) -> VerifySession:
    return VerifySession("s", context=10_000, vocab_size=VOCAB, max_window=max_window)
