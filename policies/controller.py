"""Puts triggers, schedules and learners together: what a `Method` does, session by session.

`Learned` is what one edge node has learned of its link, its verifier and its pair of models; all
its sessions share it. `Controller` is one session's `Control`: it makes plans from a method and
what is learned, and passes on what the session sees. Nothing here knows the protocol.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.adversarial import Exp3
from policies.autotune import Autotuner
from policies.bandit import NaiveUcb, UcbSpecStop
from policies.calibration import Calibration
from policies.control import (
    Answered,
    Committed,
    DecodedOn,
    Drafted,
    Interrupted,
    Judged,
    NavSent,
    Observation,
    Plan,
    RoundEnded,
)
from policies.costs import IDS_ONLY, Wire
from policies.crossover import Mode
from policies.environment import Environment, EnvironmentMonitor
from policies.lengths import (
    AcceptanceCounts,
    Bandit,
    BlindOrContextual,
    Planned,
    RoundCosts,
    critical_rtt_ms,
    oracle_draft_len,
)
from policies.methods import LENGTH_LEARNERS, ORACLES, Learner, Method
from policies.mode import ModeChooser
from policies.saved import entries
from policies.thresholds import Bounds, Setting
from policies.token_batches import BatchCosts, Window, plan
from policies.trigger import (
    DualThresholdTrigger,
    EntropyTrigger,
    FixedTrigger,
    PriceTrigger,
    SequenceTrigger,
    TokenTrigger,
    Trigger,
    adapted_threshold,
)

DRAFT_MS = 36.0  # taken for a draft step until one is measured
EVALUATION_TOKENS = 50  # of one evaluation of the thresholds (PipeSD §9.1)
TUNE_BUDGET = 16  # evaluations (PipeSD §3.7)
DECODE_ON = 8  # tokens of a round without drafts
REVIEW_EVERY = 16  # answers between two looks at the environment


class Learned:
    """What the sessions of one edge node have learned, for one method and pair of models.

    `calibration` is of the pair, whatever the method. `seed` is for what draws: EXP3's arms, the
    tuner's first settings. `wire` says what messages weigh.
    """

    def __init__(self, method: Method, *, seed: int = 0, wire: Wire = IDS_ONLY) -> None:
        self.method = method
        self.wire = wire
        self.calibration = Calibration()
        self.monitor = EnvironmentMonitor()
        self.environment: Environment | None = None  # as last looked at
        self.window = Window(method.max_window)
        self.counts = AcceptanceCounts(method.draft_len)
        self.rounds = RoundCosts(method.draft_len)
        self.sequence_threshold = method.sequence_threshold
        self.bandit = _bandit(method)
        self.tuner = _tuner(method, seed) if method.learner == "autotune" else None
        self.setting = Setting(method.sequence_threshold, method.token_threshold)
        self.setting_due = False  # an evaluation is over: `choose_setting` may take 0.2 s
        self.modes = _modes(method, wire)
        self.rng = np.random.default_rng(seed)
        self._answers = 0
        self._evaluated_ms, self._evaluated_tokens = 0.0, 0
        self._changes_seen = 0  # of the environment
        self._critical_rtt_ms: float | None = None
        self._oracle_len: int | None = None  # as last computed

    @property
    def draft_ms(self) -> float:
        """A draft step as measured, or DRAFT_MS."""
        return DRAFT_MS if self.environment is None else self.environment.costs.draft_ms

    def choose_setting(self) -> None:
        """Take the tuner's next setting; a Gaussian process is fitted to all before."""
        assert self.tuner is not None
        try:
            self.setting = self.tuner.ask()
        finally:
            self.setting_due = False

    def next_round(self) -> Planned:
        """What the next round is to be, for a learner of lengths; length 0 speculates not."""
        match self.bandit:
            case None:
                oracle_len = self._oracle_len
                return Planned(self.method.draft_len if oracle_len is None else oracle_len)
            case BlindOrContextual():
                return self.bandit.select()
            case Exp3():
                return Planned(self.bandit.select(self.rng))
            case _:
                return Planned(self.bandit.select())

    # ---- what happened

    def judged(self, judged: Judged) -> None:
        self.calibration.observe(judged.draft.confidence, judged.accepted)
        self.counts.observe(judged.position, judged.accepted)
        if self.modes is not None:
            self.modes.judged(judged.accepted)

    def nav_sent(self, draft_len: int) -> None:
        if draft_len:  # what asks the verifier to decode says nothing of how long drafts are
            self.window.observe_nav(draft_len)
            if self.modes is not None:
                self.modes.nav_sent(draft_len)

    def answered(self, answered: Answered) -> None:
        rtt_ms = answered.ms - answered.verify_ms
        if answered.alone and answered.verify_ms != 0.0:
            self.monitor.observe_round_trip(self.wire.num_bytes(answered.sent_ids), rtt_ms)
            # a mode without drafts would leave the line of forwards no other size
            if self.modes is None or answered.draft_len:
                self.monitor.observe_verify(answered.forward_ids, answered.verify_ms)
        if self.method.learner == "dynamic-threshold":
            self.sequence_threshold = adapted_threshold(
                self.sequence_threshold, answered.draft_len, answered.accepted
            )
        self._answers += 1
        if self._answers % REVIEW_EVERY == 0:
            self._look_at_environment()
            self._review_lengths()
        if isinstance(self.bandit, BlindOrContextual):
            self.bandit.observe_rtt(max(0.0, rtt_ms), self._critical_rtt_ms)

    def round_ended(self, ended: RoundEnded, planned: Planned | None) -> None:
        """A round; unless it went as `planned`, it is none of an arm, and no bandit's affair."""
        if planned is None or planned.draft_len != ended.draft_len:
            return
        match self.bandit:
            case None:
                return
            case BlindOrContextual():
                self.bandit.update(planned, ended.ms, ended.committed)
            case _:
                self.bandit.update(planned.draft_len, ended.ms, ended.committed)

    def committed(self, setting: Setting, count: int, ms: float) -> None:
        """So many tokens in so many milliseconds by that setting, for the tuner."""
        if self.modes is not None:
            self.modes.observe(Mode.COLLABORATIVE, count, ms, 0.0)
        if self.tuner is None or self.setting_due or setting != self.setting:
            return
        self._evaluated_ms += ms
        self._evaluated_tokens += count
        if self._evaluated_tokens >= EVALUATION_TOKENS:
            self.tuner.tell(self.setting, self._evaluated_ms / self._evaluated_tokens)
            self._evaluated_ms, self._evaluated_tokens = 0.0, 0
            self.setting_due = True

    def decode_on(self) -> int:
        """Tokens that the verifier is to write alone now, by the method's objective; 0: draft."""
        return 0 if self.modes is None else self.modes.decode_on(self._look_at_environment)

    def _look_at_environment(self) -> Environment | None:
        self.environment = self.monitor.snapshot()
        if self.monitor.changes > self._changes_seen:
            self._changes_seen = self.monitor.changes
            self._adapt()
        return self.environment

    def _adapt(self) -> None:
        """The environment changed: what rounds cost before is past, and the search begins anew."""
        self.rounds = RoundCosts(self.method.draft_len)
        if self.modes is not None:
            self.modes.changed()
        if self.tuner is not None and not (self.setting_due or self.tuner.tuning):
            self.tuner.retune()
            self._evaluated_ms, self._evaluated_tokens = 0.0, 0
            self.setting_due = True

    def _review_lengths(self) -> None:
        learner = self.method.learner
        if learner == "ucb-contextual":
            self._critical_rtt_ms = critical_rtt_ms(self.counts, self.environment)
        elif learner in ORACLES and self.environment is not None:
            self._oracle_len = oracle_draft_len(learner, self.counts, self.rounds, self.environment)

    # ---- saved

    def state(self) -> dict[str, Any]:
        """What of the method is worth keeping over a restart, as plain JSON types.

        The calibration is not in it: it has a state of its own, for all methods on the pair.
        """
        return {
            "kind": "learned",
            "bandit": None if self.bandit is None else self.bandit.state(),
            "tuner": None if self.tuner is None else self.tuner.state(),
        }

    def restore(self, state: object) -> None:
        """Go on from a `state()` of the same method. Raises ValueError, and changes nothing."""
        bandit, tuner = entries(state, "learned", "bandit", "tuner")
        if (bandit is None, tuner is None) != (self.bandit is None, self.tuner is None):
            raise ValueError(f"state must be of a method with learner {self.method.learner!r}")
        if self.bandit is not None:
            self.bandit.restore(bandit)
        if self.tuner is not None:
            self.tuner.restore(tuner)
            self.setting, self.setting_due = self.tuner.best, True

    def restore_calibration(self, state: object) -> None:
        """Go on from a `calibration.state()` of the same pair; ValueError changes nothing."""
        self.calibration = Calibration.restored(state)


class Controller:
    """One session's control."""

    def __init__(self, learned: Learned) -> None:
        self._learned = learned
        self._method = learned.method
        self._committed_ms: float | None = None  # when the last tokens were
        self._setting = learned.setting  # of the last plan
        self._planned: Planned | None = None  # the round of the last plan, by a learner of lengths
        self._answered: Answered | None = None  # of the round that is about to end
        self._drafting = True  # by the last plan

    def plan(self) -> Plan:
        """How the next drafts go."""
        method, learned = self._method, self._learned
        self._setting = learned.setting
        if method.learner in LENGTH_LEARNERS:
            self._planned = learned.next_round()
            if self._planned.draft_len == 0:
                return Plan(FixedTrigger(1), decode_on=DECODE_ON)
            return Plan(FixedTrigger(self._planned.draft_len), self._batches())
        decode_on = learned.decode_on()
        self._drafting = not decode_on
        # drafts that come all the same are judged as ever
        return Plan(self._trigger(), self._batches(), decode_on)

    def observe(self, observation: Observation) -> None:
        """Pass on what the session saw."""
        learned = self._learned
        match observation:
            case Drafted(ms=ms):
                learned.monitor.observe_draft(ms)
            case NavSent(draft_len=draft_len):
                learned.nav_sent(draft_len)
            case Judged():
                learned.judged(observation)
            case Answered(draft_len=draft_len, verify_ms=verify_ms):
                self._answered = observation
                learned.answered(observation)
                if learned.modes is not None and self._drafting and draft_len:
                    learned.modes.observe(Mode.COLLABORATIVE, 0, 0.0, verify_ms)
            case DecodedOn(ms=ms, verify_ms=verify_ms):
                if learned.modes is not None:
                    learned.modes.observe(Mode.CLOUD_ONLY, 1, ms, verify_ms)
            case RoundEnded():
                if self._answered is not None:
                    learned.rounds.observe(observation, self._answered)
                self._answered = None
                learned.round_ended(observation, self._planned)
            case Committed(count=count, at_ms=at_ms):
                # the first tokens of a session took its prefill too
                if self._committed_ms is not None and self._drafting:
                    learned.committed(self._setting, count, at_ms - self._committed_ms)
                self._committed_ms = at_ms
            case Interrupted():
                self._committed_ms = None

    def _trigger(self) -> Trigger:
        method, learned = self._method, self._learned
        most = method.draft_len
        match method.trigger:
            case "fixed":
                return FixedTrigger(most)
            case "token":
                return TokenTrigger(method.token_threshold, most)
            case "sequence":
                return SequenceTrigger(learned.sequence_threshold, most)
            case "dual":
                setting = learned.setting
                return DualThresholdTrigger(
                    setting.sequence_threshold, setting.token_threshold, most
                )
            case "entropy":
                return EntropyTrigger(method.rejection_threshold, most)
            case "price":
                curve = learned.calibration.curve
                return PriceTrigger(method.nav_price_ms, learned.draft_ms, curve, most)

    def _batches(self) -> tuple[int, ...]:
        match self._method.batches:
            case "nav":
                return ()
            case "each":
                return (1,)
            case "planned":
                return self._schedule()

    def _schedule(self) -> tuple[int, ...]:
        learned = self._learned
        if learned.environment is None:
            return (1,)
        link = learned.environment.link
        costs = BatchCosts.of(learned.draft_ms, link, learned.wire)
        return plan(learned.window.num_tokens, costs)


def _bandit(method: Method) -> Bandit | None:
    arms = tuple(range(method.draft_len + 1))
    learner: Learner = method.learner
    match learner:
        case "ucb":
            return UcbSpecStop(arms)
        case "ucb-contextual":
            return BlindOrContextual(arms)
        case "naive-ucb":
            return NaiveUcb(arms)
        case "exp3":
            return Exp3(arms)
        case _:
            return None


def _modes(method: Method, wire: Wire) -> ModeChooser | None:
    if method.objective is None:
        return None
    max_navs = method.max_navs_in_flight if method.draft_while_waiting else 1
    nav_bytes = wire.num_bytes(method.draft_len)
    return ModeChooser(method.objective, max_navs, method.max_window, nav_bytes)


def _tuner(method: Method, seed: int) -> Autotuner:
    default = Setting(method.sequence_threshold, method.token_threshold)
    return Autotuner(default, bounds=Bounds(), budget=TUNE_BUDGET, seed=seed)
