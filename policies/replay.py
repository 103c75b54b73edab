"""A recorded trace as a pair of models for the simulator, and as one without a recording.

Replayed are ids and confidences; the times are the scenario's. What the draft model would say after
a wrong draft of its own is in the trace's roll-outs; how often those drafts agree with the target
does not matter, since nothing after a rejected draft is judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.traces import ROLLOUT_LEN, PromptTrace
from policies.types import Ids, Pick

OFF_PATH_ID = 0  # of drafts that nobody will judge
TARGET_ID = 1  # every token of a synthetic answer
LEAST_RATE = 1e-9  # an entropy must be finite


class ReplayPair:
    """One prompt's trace as the two models of one session; positions count from its end."""

    def __init__(self, trace: PromptTrace) -> None:
        self.prompt: Ids = (OFF_PATH_ID,) * trace.prompt_len
        self.max_tokens = int(trace.target_ids.size)
        self._answer: list[int] = trace.target_ids.tolist()
        self.answer: Ids = tuple(self._answer)
        self.mistakes: frozenset[int] = frozenset(trace.mismatches.tolist())
        self._picks = [
            Pick(*drafted)
            for drafted in zip(
                trace.draft_ids[:, 0].tolist(),
                trace.confidences.tolist(),
                trace.entropies.tolist(),
                strict=True,
            )
        ]
        self._rollouts = {
            int(missed): [Pick(OFF_PATH_ID, *signal) for signal in rollout]
            for missed, rollout in zip(trace.mismatches, trace.rollouts.tolist(), strict=True)
        }
        self._wrong_at: int | None = None

    def draft(self, ids: Sequence[int], since_rewind: int) -> Pick:
        """What the draft model drafted there, on the target's path or off it."""
        at = len(ids) - len(self.prompt)
        if not since_rewind:
            self._wrong_at = None
        if self._wrong_at is not None:
            rollout = self._rollouts[self._wrong_at]
            return rollout[min(at - self._wrong_at, ROLLOUT_LEN) - 1]
        pick = self._picks[at]
        if pick.id != self._answer[at]:
            self._wrong_at = at
        return pick

    def target_ids(self, ids: Sequence[int], start: int) -> list[int]:
        """The recorded answer, up to where the ids leave it."""
        at = start + 1 - len(self.prompt)
        targets: list[int] = []
        for drafted, own in zip([*ids[start + 1 :], None], self._answer[at:], strict=False):
            targets.append(own)
            if drafted != own:
                break
        return targets


class RenewalPair:
    """A draft model whose j-th draft since it last heard of the target agrees with rate `rates[j]`.

    The last rate holds from there on. With one NAV at a time that is acceptance by position in the
    round, the curve that UCB-SpecStop measures (R2, §VI-B); a constant rate is its Assumption 1.
    `luck` is uniform, [max_tokens]: a draft agrees if the luck of its position is below its rate,
    so all methods meet the same luck.
    """

    def __init__(self, rates: Sequence[float], luck: Sequence[float]) -> None:
        self.prompt: Ids = (OFF_PATH_ID,)
        self.max_tokens = len(luck)
        self.answer: Ids = (TARGET_ID,) * len(luck)
        self._rates = tuple(rates)
        self._luck = luck

    def draft(self, ids: Sequence[int], since_rewind: int) -> Pick:
        """Its rate is its confidence and exp(-entropy), so it is as sure as it should be."""
        rate = self._rates[min(since_rewind, len(self._rates) - 1)]
        entropy = -math.log(max(rate, LEAST_RATE))
        return Pick(TARGET_ID if self._luck[len(ids) - 1] < rate else OFF_PATH_ID, rate, entropy)

    @property
    def mistakes(self) -> frozenset[int]:
        """Where a drafter falls that hears of the target only there."""
        mistakes, drafts = [], 0
        for at, luck in enumerate(self._luck):
            drafts += 1
            if luck >= self._rates[min(drafts, len(self._rates)) - 1]:
                mistakes.append(at)
                drafts = 0
        return frozenset(mistakes)

    def target_ids(self, ids: Sequence[int], start: int) -> list[int]:
        """The same id again and again, up to where a draft is another."""
        targets: list[int] = []
        for drafted in [*ids[start + 1 :], None]:
            targets.append(TARGET_ID)
            if drafted != TARGET_ID:
                break
        return targets


def clairvoyant_ms(
    mistakes: frozenset[int], num_tokens: int, *, draft_ms: float, rtt_ms: float, verify_ms: float
) -> float:
    """The least time of a single path of drafts: nobody who drafts one token at a time is faster.

    It knows the draft model's mistakes beforehand: it never drafts one, asks for the target's token
    there as soon as the draft before it is made, and waits for that answer only. The verifier
    decodes nothing by itself, and messages take no time but the round trip. The last token is the
    verifier's own. So it is draft_ms for each right draft, rtt_ms + verify_ms for each mistake and
    for the end.
    """
    asked = len(mistakes | {num_tokens - 1})
    return asked * (rtt_ms + verify_ms) + (num_tokens - asked) * draft_ms
