"""Cloud-only or collaborative: acts on `crossover`, by what both modes are measured to take.

The target runs in the cloud alone, so there is no edge-only mode here. The crossover model knows
fixed draft lengths, a constant acceptance rate and a verifier of its own; each of its predictions
is multiplied by what the mode took over what had been predicted for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from policies.crossover import (
    Decision,
    Mode,
    Objective,
    Prediction,
    Snapshot,
    decide,
    predict_collaborative,
    score,
)
from policies.environment import MAX_MS, Environment

ENOUGH_JUDGED = 256  # drafts before anything but drafting is considered
REVIEW_TOKENS = 64  # tokens between two decisions
MEMORY_TOKENS = 2048  # after so many, what drafting was like counts for 1/e
CLOUD_MEMORY_TOKENS = 64  # a forward over one id varies little, and its change is to be seen soon
MAX_ROUND_TRIP_SHARE = 0.01  # of a stretch of cloud-only, for its one round trip
MIN_STRETCH, MAX_STRETCH = 64, 4096  # tokens
PROBE_TOKENS = {Mode.COLLABORATIVE: 64, Mode.CLOUD_ONLY: 16}
PROBE_EVERY = 2048  # tokens between two probes, at least
MAX_PROBE_SHARE = 0.01  # of what is spent in between, for what a probe is dearer


class _Ratio:
    """A ratio of sums that fades: what came `memory` tokens ago weighs 1/e."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.above = self.below = 0.0

    def add(self, above: float, below: float) -> None:
        self.above += above
        self.below += below

    def fade(self, tokens: int) -> None:
        kept = math.exp(-tokens / self._memory)
        self.above *= kept
        self.below *= kept

    def value(self, unknown: float) -> float:
        return self.above / self.below if self.below > 0.0 else unknown


class _Played:
    """What a mode took since the last review, and over all, set against its predictions."""

    def __init__(self, memory: float) -> None:
        self._of_tpt, self._of_verifier = _Ratio(memory), _Ratio(memory)
        self._forget_period()

    def _forget_period(self) -> None:
        self._tokens, self._ms, self._verifier_ms = 0, 0.0, 0.0

    def observe(self, tokens: int, ms: float, verifier_ms: float) -> None:
        if 0.0 <= ms <= MAX_MS and 0.0 <= verifier_ms <= MAX_MS:
            self._tokens += tokens
            self._ms += ms
            self._verifier_ms += verifier_ms

    def corrected(self, predicted: Prediction, tokens: int) -> Prediction:
        """The prediction as measured; ends a period of `tokens` in all modes."""
        pairs = (
            (self._of_tpt, self._ms, predicted.tpt_ms),
            (self._of_verifier, self._verifier_ms, predicted.verifier_ms_per_token),
        )
        for ratio, took_ms, predicted_ms in pairs:
            ratio.fade(tokens)
            ratio.add(took_ms, predicted_ms * self._tokens)
        self._forget_period()
        tpt_ms, verifier_ms = (
            min(predicted_ms * ratio.value(1.0), MAX_MS) for ratio, _, predicted_ms in pairs
        )
        return Prediction(predicted.mode, tpt_ms, verifier_ms)


class ModeChooser:
    """The mode of an edge node's sessions, by an objective of `crossover.choose`.

    Collaborative until the environment and ENOUGH_JUDGED drafts are known. Cloud-only goes in
    stretches so long that the round trip of each is at most MAX_ROUND_TRIP_SHARE of it (of
    MAX_STRETCH tokens at the most); no stretch is broken off. The mode not in use is probed for
    PROBE_TOKENS, at once when the environment changed, else after PROBE_EVERY tokens or as many
    more as it takes until the probe, by what is known, costs MAX_PROBE_SHARE of them. An answer
    under way, several of them at a time, may exceed a probe.
    """

    def __init__(
        self, objective: Objective, max_navs_in_flight: int, max_window: int, nav_bytes: float
    ) -> None:
        self.decision: Decision | None = None  # the last
        self._objective = objective
        self._max_navs, self._max_window = max_navs_in_flight, max_window
        self._nav_bytes = nav_bytes
        self._acceptance, self._draft_len = _Ratio(MEMORY_TOKENS), _Ratio(MEMORY_TOKENS)
        self._played = {
            Mode.COLLABORATIVE: _Played(MEMORY_TOKENS),
            Mode.CLOUD_ONLY: _Played(CLOUD_MEMORY_TOKENS),
        }
        self._rtt_ms = 0.0
        self._unreviewed = 0  # tokens since the last review
        self._unprobed = 0  # tokens since the last probe
        self._probe_left: dict[Mode, int] = {}  # tokens of the probe under way

    # ---- what happened

    def nav_sent(self, draft_len: int) -> None:
        """A NAV over `draft_len` drafts; one without drafts tells nothing of drafting."""
        if draft_len:
            self._draft_len.add(draft_len, 1)

    def judged(self, accepted: bool) -> None:
        """A draft was judged."""
        self._acceptance.add(accepted, 1)

    def observe(self, mode: Mode, tokens: int, ms: float, verifier_ms: float) -> None:
        """So many tokens came by that mode; a time that cannot be one is left out."""
        self._played[mode].observe(tokens, ms, verifier_ms)
        self._unreviewed += tokens
        if mode in self._probe_left:
            self._probe_left[mode] -= tokens
            if self._probe_left[mode] <= 0:
                self._probe_left.clear()
        else:
            self._unprobed += tokens

    def changed(self) -> None:
        """The environment changed: what the other mode takes is to be measured anew."""
        if self.decision is not None:
            self._begin_probe(self.decision)

    # ---- what to do

    def decode_on(self, environment: Callable[[], Environment | None]) -> int:
        """How many tokens the verifier is to decode by itself now; 0: draft.

        `environment` is asked once per REVIEW_TOKENS.
        """
        if self._unreviewed >= REVIEW_TOKENS:
            self._review(environment())
        if self.decision is None:
            return 0
        if not self._probe_left and self._probe_due(self.decision):
            self._begin_probe(self.decision)
        probed = next(iter(self._probe_left), None)
        if (probed or self.decision.mode) is Mode.COLLABORATIVE:
            return 0
        # the first token of a stretch is a NAV's, and tells nothing of decoding on
        return 1 + self._probe_left[probed] if probed else self._stretch(self.decision)

    def _review(self, environment: Environment | None) -> None:
        known = self.decision is not None or self._acceptance.below >= ENOUGH_JUDGED
        if environment is None or not known:
            return
        tokens, self._unreviewed = self._unreviewed, 0
        self._rtt_ms = environment.link.rtt_ms
        snapshot = self._snapshot(environment)
        alone_ms = snapshot.forward_ms(1)
        predictions = (
            Prediction(Mode.CLOUD_ONLY, max(alone_ms, snapshot.link.overhead_ms), alone_ms),
            predict_collaborative(snapshot),
        )
        corrected = tuple(
            self._played[predicted.mode].corrected(predicted, tokens) for predicted in predictions
        )
        self._acceptance.fade(tokens)
        self._draft_len.fade(tokens)
        current = None if self.decision is None else self.decision.mode
        self.decision = decide(corrected, self._objective, current)
        if self.decision.mode in self._probe_left:
            self._probe_left.clear()

    def _snapshot(self, environment: Environment) -> Snapshot:
        draft_len = min(max(1, round(self._draft_len.value(1.0))), self._max_window)
        return Snapshot(
            environment.costs,
            environment.link,
            (min(1.0, self._acceptance.value(0.0)),),
            draft_len,
            min(self._max_navs, max(1, self._max_window // draft_len)),
            self._nav_bytes,
        )

    def _stretch(self, decision: Decision) -> int:
        token_ms = _prediction(decision, Mode.CLOUD_ONLY).tpt_ms
        share_ms = MAX_ROUND_TRIP_SHARE * token_ms
        wanted = math.ceil(self._rtt_ms / share_ms) if share_ms > 0.0 else MAX_STRETCH
        return min(max(wanted, MIN_STRETCH), MAX_STRETCH)

    def _probe_due(self, decision: Decision) -> bool:
        if self._unprobed < PROBE_EVERY:
            return False
        other = _other(decision.mode)
        used, probed = (
            score(_prediction(decision, mode), self._objective) for mode in (decision.mode, other)
        )
        # the switches there and back take a round trip each
        extra = PROBE_TOKENS[other] * max(0.0, probed - used) + 2.0 * self._rtt_ms
        return self._unprobed * used * MAX_PROBE_SHARE >= extra

    def _begin_probe(self, decision: Decision) -> None:
        other = _other(decision.mode)
        self._probe_left = {other: PROBE_TOKENS[other]}
        self._unprobed = 0


def _other(mode: Mode) -> Mode:
    return Mode.CLOUD_ONLY if mode is Mode.COLLABORATIVE else Mode.COLLABORATIVE


def _prediction(decision: Decision, mode: Mode) -> Prediction:
    return next(found for found in decision.predictions if found.mode is mode)
