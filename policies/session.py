"""The edge's half of the protocol, sans I/O: events in, actions out.

The session owns the sequence: prompt, committed ids and, past them, the window of draft ids that no
verdict covers yet. Only this half increments the epoch. A verdict commits only the growth of the
committed prefix, so late, repeated and overlapping verdicts are harmless. The module knows no
drafter, no link and no clock; times are milliseconds on any monotonic clock, given with each event.

The methods of the papers are settings, not code: one NAV at a time and no drafting meanwhile is
Vanilla and HSL; drafting while waiting is EdgeLLM and PipeSD; several NAVs in flight is the sliding
window; `speculate=False` is decoding by the target alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policies.control import Constant, Control, Plan
from policies.draft_window import DraftWindow
from policies.events import (
    Cancelled,
    CloseSession,
    DeadlinePassed,
    DrafterLost,
    EdgeAction,
    EdgeEvent,
    Emit,
    Finish,
    GrantDraft,
    LinkLost,
    LinkRestored,
    OpenSession,
    RewindDrafter,
    SendBatch,
    SetDeadline,
    TokenDrafted,
    VerdictArrived,
)
from policies.metrics import SessionMetrics
from policies.patience import Patience
from policies.rounds import Rounds
from policies.token_batches import drafts_until_batch
from policies.trigger import (
    DraftSignal,
    FixedTrigger,
    Trigger,
    drafts_until_decision,
    fires,
    max_draft_len,
)
from policies.types import (
    Batch,
    Close,
    FinishReason,
    Ids,
    Open,
    Origin,
    SamplingParams,
    SessionError,
    Verdict,
    VerdictKind,
)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How a session drafts. Raises ValueError naming a field that is out of range.

    `max_window`: draft tokens that may wait for a verdict. `trigger` and `batch_len` are the plan
    of a session without a control: when to verify, and drafts sent as soon as that many are unsent
    (None keeps them for their NAV). After `resend_after_ms` of silence what is
    not answered is sent again, each time twice as late; after `give_up_after_ms` without progress
    the session fails. A drafter that owes a token for `drafter_timeout_ms` while no verdict is
    awaited is given up, and the target decodes alone; the first token may take 20 ms per prompt
    token longer.
    """

    trigger: Trigger = field(default_factory=lambda: FixedTrigger(4))
    max_window: int = 4
    max_navs_in_flight: int = 1
    draft_while_waiting: bool = False
    batch_len: int | None = None
    speculate: bool = True
    resend_after_ms: float = 5_000.0
    give_up_after_ms: float = 300_000.0
    drafter_timeout_ms: float = 10_000.0

    def __post_init__(self) -> None:
        if self.max_window < max_draft_len(self.trigger):
            raise ValueError(
                f"max_window must be >= the trigger's {max_draft_len(self.trigger)} drafts, "
                f"got {self.max_window}"
            )
        for name in ("max_navs_in_flight", "batch_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        for name in ("resend_after_ms", "give_up_after_ms", "drafter_timeout_ms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")

    @property
    def plan(self) -> Plan:
        """What a session without a control goes by."""
        return Plan(self.trigger, () if self.batch_len is None else (self.batch_len,))


# a session that is taken and lost so often, without a token in between, may itself be the killer
_MAX_FRUITLESS_OPENS = 4


class DraftSession:
    """One request at the edge, from prompt to finish.

    Guarantees: the emitted ids are the target's own, each position once and in order, never more
    than `max_tokens` and nothing after a stop id; `prompt + generated` never exceeds
    `target_context`, and no position at or past `draft_context` is drafted. A request always makes
    progress: whenever nothing is on its way, a NAV is sent.
    """

    def __init__(
        self,
        session: str,
        prompt: Ids,
        *,
        sampling: SamplingParams,
        max_tokens: int,
        draft_context: int,
        target_context: int,
        config: SessionConfig,
        control: Control | None = None,
    ) -> None:
        _check_lengths(prompt, max_tokens, target_context)
        self.metrics = SessionMetrics()
        self.epoch = 0
        self.finished: Finish | None = None
        self.speculating = config.speculate
        self.name = session
        self._config = config
        self._rounds = Rounds(Constant(config.plan) if control is None else control)
        self.sampling = replace(sampling, prompt_len=len(prompt))
        self._stop_ids = sampling.stop_ids
        self._prompt_len = len(prompt)
        self._window = DraftWindow.after(prompt)
        self._limit = min(len(prompt) + max_tokens, target_context)
        self._draft_context = draft_context
        self._navs: list[int] = []  # ends of the NAVs without a verdict
        self._decode_until = 0  # the verifier decodes by itself up to this position
        self._arrived_ms = 0.0  # when the last verdict came
        self._early: dict[int, Verdict] = {}  # verdicts whose predecessor has not arrived, by start
        self._gap_filled: int | None = None
        self._gap_behind = False  # the verifier asked for ids that are committed already
        self.opened = False  # the verifier has acknowledged this epoch's Open, or any verdict came
        self._nav_due = self._ever_opened = self._link_down = self._overtook_open = False
        self._fruitless_opens = self._drafter_epoch = 0
        self._drafter_at = self._granted = len(prompt)  # the drafter's next position; its credit
        self._patience = Patience(
            config.resend_after_ms, config.give_up_after_ms, config.drafter_timeout_ms
        )
        self._deadline_ms: float | None = None

    @property
    def generated(self) -> Ids:
        """The committed ids after the prompt."""
        return tuple(self._window.ids[self._prompt_len : self._window.committed])

    def start(self, at_ms: float) -> list[EdgeAction]:
        """The first actions; called once, before any event."""
        self.metrics.started_ms = at_ms
        self._patience.drafter_ms = self._patience.progress_ms = at_ms
        return [self._open(at_ms), *self._proceed(at_ms)]

    def handle(self, event: EdgeEvent) -> list[EdgeAction]:
        """Take one event. Raises SessionError, and changes nothing, if the protocol forbids it.

        What arrives after the finish is ignored.
        """
        if self.finished is not None:
            return []
        match event:
            case TokenDrafted():
                actions = self._on_drafted(event)
            case VerdictArrived(verdict=verdict, at_ms=at_ms, arrived_ms=arrived_ms):
                arrived_ms = at_ms if arrived_ms is None else arrived_ms
                actions = self._on_verdict(verdict, at_ms, arrived_ms)
            case DrafterLost():
                self.speculating = False
                actions = []
            case LinkLost(at_ms=at_ms):
                self._start_waiting(at_ms)
                self._link_down = True
                actions = []
            case LinkRestored(at_ms=at_ms):
                actions = self._reopen(at_ms)
            case DeadlinePassed(at_ms=at_ms):
                actions = self._on_deadline(at_ms)
            case Cancelled():
                actions = self._finish(FinishReason.CANCELLED)
        return actions + self._proceed(event.at_ms)

    def paused(self) -> None:
        """The client paused: the times of what is under way tell nothing of drafter and link."""
        self._rounds.paused()

    def fail(self, error: str) -> list[EdgeAction]:
        """End the session with an error: the verifier broke the protocol."""
        return [] if self.finished is not None else self._finish(FinishReason.ERROR, error)

    # ---- events

    def _on_drafted(self, drafted: TokenDrafted) -> list[EdgeAction]:
        if drafted.epoch < self._drafter_epoch or not self.speculating:
            return []
        if (
            drafted.epoch > self._drafter_epoch
            or drafted.position != self._drafter_at
            or drafted.position >= self._granted
        ):
            raise SessionError(
                f"expected a draft of epoch {self._drafter_epoch} at {self._drafter_at}, below "
                f"{self._granted}; got epoch {drafted.epoch} at {drafted.position}"
            )
        self._drafter_at += 1
        if self.metrics.drafted:  # the first one took a prefill too
            self._rounds.drafted(drafted.at_ms - self._patience.drafter_ms)
        self._patience.drafter_ms = drafted.at_ms
        if drafted.position < self._window.committed:  # the verifier was faster
            if drafted.id == self._window.ids[drafted.position]:
                return []
            return self._rewind_drafter(drafted.position)
        self._window.draft(drafted.id, DraftSignal(drafted.confidence, drafted.entropy))
        self.metrics.drafted += 1
        plan = self._rounds.plan(self._window.committed, drafted.at_ms)
        if drafted.id in self._stop_ids or fires(plan.trigger, self._window.since_nav):
            self._nav_due = True
        return []

    def _on_verdict(self, verdict: Verdict, at_ms: float, arrived_ms: float) -> list[EdgeAction]:
        if verdict.session != self.name or verdict.epoch > self.epoch:
            raise SessionError(f"session {self.name}, epoch {self.epoch}: got {verdict}")
        if verdict.epoch < self.epoch:
            return []
        if verdict.kind is VerdictKind.UNKNOWN_SESSION:
            if self.opened:
                return self._reopen(at_ms)
            self._overtook_open = True  # the Open is still on its way
            return []
        self._refuse_impossible(verdict)
        self._arrived_ms = arrived_ms
        actions = [] if self.opened else self._acknowledged(at_ms)
        self._patience.heard(at_ms)
        self.metrics.verify_ms += verdict.verify_ms
        return actions + self._take(verdict, at_ms)

    def _acknowledged(self, at_ms: float) -> list[EdgeAction]:
        self.opened = True
        self._patience.drafter_ms = at_ms
        self._rounds.untimed()
        if not self._ever_opened:  # waiting for a place and the prefill were no silence
            self._ever_opened = True
            self._patience.progress_ms = at_ms
        if not (self._overtook_open and self._navs):
            return []
        self.metrics.resends += 1
        return [self._send_again(self._window.committed)]

    def _take(self, verdict: Verdict, at_ms: float) -> list[EdgeAction]:
        match verdict.kind:
            case VerdictKind.ERROR:
                return self._finish(FinishReason.ERROR, verdict.error)
            case VerdictKind.VOID:  # the verdict that closed this epoch was lost: ask anew
                self._advance_epoch()
                return []
            case VerdictKind.GAP:
                return self._fill_gap(verdict.start)
            case _:
                return self._apply_in_order(verdict, at_ms)

    def _refuse_impossible(self, verdict: Verdict) -> None:
        judged = verdict.start + verdict.accepted
        own = self._window.ids[judged] if judged < self._window.sent else None
        covered = verdict.accepted + (verdict.next_id is not None)
        if self.sampling.logprobs is not None and len(verdict.logprobs) != covered:
            raise SessionError(f"{verdict} has not one logprobs entry for each of {covered} tokens")
        if verdict.accepted and (verdict.accepted < 0 or judged > self._window.sent):
            raise SessionError(
                f"{verdict} judges drafts past {self._window.sent}, where sending stopped"
            )
        if verdict.kind is VerdictKind.RECOVERED and own in (None, verdict.next_id):
            raise SessionError(f"{verdict} rejects a draft that was not sent, or does not")
        if judged < self._window.committed and verdict.next_id not in (None, own):
            raise SessionError(f"{verdict} contradicts the committed id at {judged}")

    def _on_deadline(self, at_ms: float) -> list[EdgeAction]:
        if self._deadline_ms is None or at_ms < self._deadline_ms:
            return []
        if not self._awaits_verifier:
            self.speculating = False
            return []
        if self._patience.gives_up(at_ms):
            silence_s = self._config.give_up_after_ms / 1000
            return self._finish(FinishReason.ERROR, f"the verifier was silent for {silence_s:g} s")
        self._patience.silences += 1
        self._gap_filled = None
        if self._gap_behind:  # it holds an older state of this session
            return self._reopen(at_ms)
        self._patience.sent(at_ms)
        actions: list[EdgeAction] = [] if self.opened else [self._open(at_ms)]
        if self._navs or self._window.committed < self._decode_until:
            actions.append(self._send_again(self._window.committed))
        self.metrics.resends += len(actions)
        return actions

    # ---- verdicts

    def _apply_in_order(self, verdict: Verdict, at_ms: float) -> list[EdgeAction]:
        if verdict.start > self._window.committed:
            if verdict.accepted or verdict.next_id is not None:
                held = self._early.setdefault(verdict.start, verdict)
                if held.accepted < verdict.accepted:
                    self._early[verdict.start] = verdict
            return []
        actions = self._apply(verdict, at_ms)
        while self.finished is None:
            ready = [start for start in self._early if start <= self._window.committed]
            if not ready:
                break
            actions += self._apply(self._early.pop(min(ready)), at_ms)
        return actions

    def _apply(self, verdict: Verdict, at_ms: float) -> list[EdgeAction]:
        """Commit what the verdict adds to the committed prefix; roll back what it refutes."""
        judged = verdict.start + verdict.accepted
        origins = [Origin.ACCEPTED] * max(0, judged - self._window.committed)
        refuted = False
        if verdict.next_id is not None:
            self._navs = [end for end in self._navs if end > judged]
            if judged >= self._window.committed:
                own = self._window.ids[judged] if judged < len(self._window.ids) else None
                refuted = own not in (None, verdict.next_id)
                if own == verdict.next_id:
                    origins.append(Origin.ACCEPTED)
                else:
                    self._window.ids[judged:] = [verdict.next_id]
                    recovered = verdict.kind is VerdictKind.RECOVERED
                    origins.append(Origin.RECOVERED if recovered else Origin.BONUS)
        if not origins:
            return []
        self.metrics.rounds += 1
        self._patience.progress_ms = at_ms
        self._fruitless_opens = 0
        self._gap_behind = False
        actions, reason = self._commit(origins, verdict, refuted, at_ms)
        if reason is not None:
            return actions + self._finish(reason)
        if verdict.next_id is not None:
            self._rounds.answered(verdict, at_ms)
            if refuted or not (self._navs or self._window.committed < self._decode_until):
                drafting = not refuted and len(self._window.ids) > self._window.nav_end
                self._rounds.settled(self._window.committed, drafting, at_ms)
        if refuted:
            self.metrics.rollbacks += 1
            actions += self._rewind_drafter(judged)
        return actions

    def _commit(
        self, origins: list[Origin], verdict: Verdict, refuted: bool, at_ms: float
    ) -> tuple[list[EdgeAction], FinishReason | None]:
        """Grow the committed prefix by one id per origin, up to a stop id or the limit."""
        reason = None
        count = 0
        first = (
            self._window.committed - verdict.start
        )  # index in the verdict of the first new token
        for index, origin in enumerate(origins, first):
            judged: int | None = index
            if index == verdict.accepted and origin is not Origin.RECOVERED:
                # `next_id` confirms or replaces the first draft of the next NAV, if there is one
                judged = 0 if refuted or origin is Origin.ACCEPTED else None
            self.metrics.count(origin, judged, self._arrived_ms)
            if judged is not None:
                accepted = origin is Origin.ACCEPTED
                self._rounds.judged(self._window.signals[count], judged, accepted)
            token_id = self._window.ids[self._window.committed + count]
            count += 1
            if token_id in self._stop_ids:
                reason = FinishReason.STOP
            elif self._window.committed + count == self._limit:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        emitted = self._window.commit(count)
        if self.speculating:
            self._rounds.committed(count, at_ms)
        self._gap_filled = None
        logprobs = verdict.logprobs[first : first + count]
        refuted = refuted and count == len(origins)
        return [Emit(emitted, tuple(origins[:count]), logprobs, refuted)], reason

    # ---- epochs

    def _advance_epoch(self) -> None:
        """Start an epoch at the committed prefix; what of the window still stands is sent anew."""
        self.epoch += 1
        self._navs.clear()
        self._early.clear()
        self._decode_until = 0
        self._gap_filled = None
        self._gap_behind = False
        self._window.begin_epoch()
        self._nav_due = len(self._window.ids) > self._window.committed
        self._rounds.dropped()

    def _rewind_drafter(self, length: int) -> list[EdgeAction]:
        self._advance_epoch()
        self._drafter_epoch = self.epoch
        self._drafter_at = self._granted = self._window.committed
        if not self._may_speculate():
            return []
        return [
            RewindDrafter(
                self.epoch, length, tuple(self._window.ids[length : self._window.committed])
            )
        ]

    def _reopen(self, at_ms: float) -> list[EdgeAction]:
        if self.opened:
            self._fruitless_opens += 1
            if self._fruitless_opens > _MAX_FRUITLESS_OPENS:
                return self._finish(
                    FinishReason.ERROR,
                    f"{self._fruitless_opens} verifiers in a row took the session and lost it",
                )
        self._advance_epoch()
        self._link_down = self.opened = self._overtook_open = False
        self.metrics.reopens += 1
        return [self._open(at_ms)]

    def _open(self, at_ms: float) -> OpenSession:
        self._patience.sent(at_ms)
        return OpenSession(
            Open(
                self.name,
                self.epoch,
                tuple(self._window.ids[: self._prompt_len]),
                self.generated,
                self.sampling,
            )
        )

    def _finish(self, reason: FinishReason, error: str = "") -> list[EdgeAction]:
        self.finished = Finish(reason, error)
        return [CloseSession(Close(self.name)), self.finished]

    # ---- what to do next

    def _proceed(self, at_ms: float) -> list[EdgeAction]:
        if self.finished is not None:
            return []
        actions: list[EdgeAction] = []
        if not self._link_down:
            actions += self._send(at_ms)
        actions += self._grant(at_ms)
        deadline_ms = self._next_deadline()
        if deadline_ms != self._deadline_ms:
            self._deadline_ms = deadline_ms
            actions.append(SetDeadline(deadline_ms))
        return actions

    def _plan(self, at_ms: float) -> Plan:
        return self._rounds.plan(self._window.committed, at_ms)

    def _may_speculate(self) -> bool:
        if self._window.committed >= self._draft_context:
            self.speculating = False
        return self.speculating

    def _draft_end(self) -> int:
        """The end of the drafts worth judging: a drafted stop id ends them."""
        for position in range(self._window.committed, len(self._window.ids)):
            if self._window.ids[position] in self._stop_ids:
                return position + 1
        return len(self._window.ids)

    def _ceiling(self, draft_end: int) -> int:
        """No draft at or past this position is wanted now.

        The last position before the limit always comes from the verifier, as a NAV's next token.
        """
        if draft_end > self._window.committed and self._window.ids[draft_end - 1] in self._stop_ids:
            return draft_end
        window_end = self._window.committed + self._config.max_window
        return min(window_end, self._limit - 1, self._draft_context)

    def _nav_wanted(self, draft_end: int, at_ms: float) -> bool:
        verifier_idle = not self._navs and self._window.committed >= self._decode_until
        if not self._may_speculate():
            return verifier_idle
        if len(self._navs) >= self._config.max_navs_in_flight:
            return False
        if verifier_idle and draft_end == self._window.nav_end and self._plan(at_ms).decode_on:
            return True
        exhausted = max(self._drafter_at, self._window.committed) >= self._ceiling(draft_end)
        if draft_end > self._window.nav_end:
            return self._nav_due or exhausted
        return exhausted and verifier_idle

    def _send(self, at_ms: float) -> list[EdgeAction]:
        draft_end = self._draft_end()
        nav = self._nav_wanted(draft_end, at_ms)
        if not nav and not self._batch_due(draft_end, at_ms):
            return []
        decode_on = self._request_nav(draft_end, at_ms) if nav else 0
        batch = self._batch(self._window.sent, draft_end, nav, decode_on)
        self._window.sent = draft_end
        return [batch]

    def _batch_due(self, draft_end: int, at_ms: float) -> bool:
        if draft_end == self._window.sent or not self.speculating:
            return False
        batches = self._plan(at_ms).batches
        if not batches:
            return False
        due = drafts_until_batch(batches, self._window.sent - self._window.period_start)
        return draft_end - self._window.sent >= due

    def _request_nav(self, draft_end: int, at_ms: float) -> int:
        """Note a NAV of the drafts up to `draft_end`; how far the verifier decodes on after it."""
        self._start_waiting(at_ms)
        self._patience.sent(at_ms)
        rest = self._limit - draft_end - 1
        decode_on = rest
        if self.speculating:
            plan = self._plan(at_ms)
            decode_on = min(plan.decode_on - 1, rest) if plan.decode_on else 0
        # a NAV replaces what was left to decode after the one before it
        self._decode_until = draft_end + 1 + decode_on if decode_on else 0
        sent_ids = draft_end - self._window.sent
        alone = not self._navs
        self._rounds.nav_sent(self._window.nav_end, draft_end, sent_ids, at_ms, alone=alone)
        self._navs.append(draft_end)
        self._window.nav_requested(draft_end)
        self._nav_due = False
        self.metrics.navs += 1
        return decode_on

    def _send_again(self, start: int) -> SendBatch:
        """Everything sent from `start` on, as one NAV that asks for all that is not answered."""
        self._navs = [self._window.sent]
        self._window.nav_requested(self._window.sent)
        self._rounds.untimed()
        return self._batch(
            start, self._window.sent, True, max(0, self._decode_until - self._window.sent - 1)
        )

    def _fill_gap(self, expected: int) -> list[EdgeAction]:
        if (
            expected < self._window.committed
        ):  # overtaken by its own verdict, unless silence follows
            self._gap_behind = True
            return []
        if not self._navs or expected == self._gap_filled or expected > self._window.sent:
            return []
        self._gap_filled = expected
        self.metrics.resends += 1
        return [self._send_again(expected)]

    def _batch(self, start: int, end: int, nav: bool, decode_on: int) -> SendBatch:
        self.metrics.batches += 1
        ids = tuple(self._window.ids[start:end])
        return SendBatch(Batch(self.name, self.epoch, start, ids, nav, decode_on))

    def _grant(self, at_ms: float) -> list[EdgeAction]:
        idle = self._drafter_at >= self._granted
        if not self._may_speculate() or (self._drafter_at < self._window.committed and not idle):
            return []
        target = self._ceiling(self._draft_end())
        at = max(self._drafter_at, self._window.committed)
        waiting = bool(self._navs) and not self._config.draft_while_waiting
        if waiting or self._window.committed < self._decode_until:
            return []
        plan = self._plan(at_ms)
        if plan.decode_on:
            return []
        if not self._config.draft_while_waiting:
            since_nav = at - self._window.nav_end
            target = min(target, at + drafts_until_decision(plan.trigger, since_nav))
        if target <= max(self._granted, at):
            return []
        actions: list[EdgeAction] = []
        if idle:
            self._patience.drafter_ms = at_ms
        if self._drafter_at < self._window.committed:
            missed = tuple(self._window.ids[self._drafter_at : self._window.committed])
            actions.append(RewindDrafter(self._drafter_epoch, self._drafter_at, missed))
            self._drafter_at = self._granted = self._window.committed
        count = target - self._granted
        actions.append(GrantDraft(self._drafter_epoch, self._granted, count))
        self._granted = target
        return actions

    # ---- time

    @property
    def _awaits_verifier(self) -> bool:
        owed = self._navs or self._window.committed < self._decode_until
        return bool(owed) or not self.opened or self._link_down

    def _start_waiting(self, at_ms: float) -> None:
        if not self._awaits_verifier:
            self._patience.progress_ms = at_ms

    def _next_deadline(self) -> float | None:
        if self._awaits_verifier:
            return self._patience.verifier_deadline(self._link_down)
        if self.speculating and self._drafter_at < self._granted:
            return self._patience.drafter_deadline(0 if self.metrics.drafted else self._prompt_len)
        return None


def _check_lengths(prompt: Ids, max_tokens: int, target_context: int) -> None:
    if not prompt or len(prompt) >= target_context:
        raise ValueError(f"prompt must have 1 to {target_context - 1} tokens, got {len(prompt)}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
