"""Edge and cloud joined over a simulated link: a discrete-event simulation of the real sessions.

Each client is a `DraftSession` with its control, its link and its `VerifySession`; the sessions'
forwards share one verifier, which takes all that wait for it into its next forward (continuous
batching). No clock and no hidden randomness: time is the simulation's own, every draw comes from
the given generator.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from policies.controller import Learned
from policies.costs import IDS_ONLY, Costs, Wire
from policies.events import (
    Cancelled,
    Check,
    Checked,
    CloseSession,
    CloudAction,
    DeadlinePassed,
    EdgeAction,
    EdgeEvent,
    Emit,
    Finish,
    GrantDraft,
    LinkLost,
    LinkRestored,
    OpenSession,
    Prefill,
    Prefilled,
    Reply,
    RewindDrafter,
    SendBatch,
    SetDeadline,
    TokenDrafted,
    VerdictArrived,
)
from policies.links import Direction, LinkModel
from policies.metrics import SessionMetrics
from policies.session import DraftSession
from policies.types import Batch, Close, Ids, Open, Pick, Verdict, VerdictKind
from policies.verify_session import VerifySession


class Pair(Protocol):
    """The two models, for one sequence."""

    def draft(self, ids: Sequence[int], since_rewind: int) -> Pick:
        """The draft model's next token after `ids`, the last `since_rewind` of which it drafted.

        Those before are the target's own.
        """

    def target_ids(self, ids: Sequence[int], start: int) -> list[int]:
        """The target's next token after ids[start] and after each id behind it.

        May end with the first one that differs from the id behind it.
        """


@dataclass(frozen=True, slots=True)
class Death:
    """The verifier forgets everything at `at_ms`; the edge hears of it only if `noticed`."""

    at_ms: float
    noticed: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the edge delivered, how the session ended, and when."""

    ids: Ids
    finish: Finish
    metrics: SessionMetrics
    elapsed_ms: float
    forwards: int  # it had a part in, prefills included
    checks: int  # of these, for NAVs or decoding on
    checked_ids: int  # fed in these


class Timeline:
    """Simulated time: what is due happens in order, and at one time in the order it was asked."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, at_ms: float, action: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (at_ms, self._scheduled, action))

    def step(self) -> bool:
        """Let the next thing happen; False if there is none."""
        if not self._queue:
            return False
        self.now_ms, _, action = heapq.heappop(self._queue)
        action()
        return True


class SharedVerifier:
    """One verifier engine: a forward takes v0 + v1·ids and serves all that wait when it begins."""

    def __init__(self, timeline: Timeline, costs: Costs, prefill_ms: float | None = None) -> None:
        self._timeline = timeline
        self._costs = costs
        self._prefill_ms = costs.verify_ms if prefill_ms is None else prefill_ms
        self._waiting: list[tuple[int, float, Callable[[float], None]]] = []
        self._busy = False
        self.forwards = 0  # prefills apart
        self.busy_ms = 0.0
        self.waited_ms: list[float] = []  # of each request, for its forward to begin

    def ask(self, num_ids: int, done: Callable[[float], None]) -> None:
        """Have `done` called with the time of the forward when it is over; 0 ids for a prefill."""
        self._waiting.append((num_ids, self._timeline.now_ms, done))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        batch, self._waiting = self._waiting, []
        self._busy = True
        num_ids = sum(ids for ids, _, _ in batch)
        cost_ms = self._costs.verify_ms + self._costs.verify_ms_per_token * num_ids
        if not num_ids:
            cost_ms = self._prefill_ms
        self.forwards += num_ids > 0
        self.busy_ms += cost_ms
        now_ms = self._timeline.now_ms
        self.waited_ms += [now_ms - asked_ms for ids, asked_ms, _ in batch if ids]

        def over() -> None:
            self._busy = False
            for _, _, done in batch:
                done(cost_ms)
            if self._waiting and not self._busy:
                self._begin()

        self._timeline.at(now_ms + cost_ms, over)


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A token batch on its way out, the link's `number`-th message, which it occupies for `ms`."""

    epoch: int
    num_bytes: int
    number: int
    ms: float


def _untold(num_bytes: int, ms: float) -> None:
    """Nobody asks how long a token batch occupied the link."""


class Client:
    """One session at the edge and what it meets: drafter, link, and its half in the cloud.

    `on_sent` is told the bytes of each token batch and for how long it occupied the uplink, which
    an edge can time; not of one that was broken off.
    """

    def __init__(
        self,
        timeline: Timeline,
        verifier: SharedVerifier,
        session: DraftSession,
        prompt: Ids,
        *,
        new_cloud: Callable[[], VerifySession],
        pair: Pair,
        uplink: Direction,
        downlink: Direction,
        draft_ms: Sequence[float],
        wire: Wire,
        on_sent: Callable[[int, float], None] = _untold,
    ) -> None:
        self.session, self._timeline, self._verifier = session, timeline, verifier
        self._new_cloud, self._pair = new_cloud, pair
        self._uplink, self._downlink, self._wire = uplink, downlink, wire
        self._draft_ms = tuple(draft_ms)  # of the j-th draft since a rewind; the last one holds on
        self._outbox: deque[Open | Batch | Close] = deque()  # waits for the link to be free
        self._leaving: _Leaving | None = None  # the last batch, until it is timed or broken off
        self._on_sent = on_sent
        self.emitted: list[int] = []
        self.finish: Finish | None = None
        self.forwards = self.checks = self.checked_ids = 0
        self._cloud: VerifySession | None = None
        self._held: list[int] = []  # the verifier engine's ids
        self._deadline_ms: float | None = None
        self._drafter_ids = list(prompt)
        self._drafter_epoch = self._credit_end = 0
        self._since_rewind = 0  # drafts
        self._step: tuple[int, int] | None = None  # epoch and position of the draft under way

    def start(self) -> None:
        self._perform(self.session.start(self._timeline.now_ms))

    def outcome(self, started_ms: float) -> Outcome:
        """What came of it, once it has finished."""
        assert self.finish is not None
        return Outcome(
            tuple(self.emitted),
            self.finish,
            self.session.metrics,
            self._timeline.now_ms - started_ms,
            self.forwards,
            self.checks,
            self.checked_ids,
        )

    # ---- edge

    def feed(self, event: EdgeEvent) -> None:
        if self.finish is None:
            self._perform(self.session.handle(event))

    def _perform(self, actions: list[EdgeAction]) -> None:
        if self._leaving is not None and self._leaving.epoch < self.session.epoch:
            self._break_off(self._leaving)
        for action in actions:
            match action:
                case SendBatch(message=message):
                    self._send(message)
                case GrantDraft(start=start, count=count):
                    self._credit_end = start + count
                    self._draft_on()
                case RewindDrafter(epoch=epoch, length=length, ids=ids):
                    self._drafter_epoch = epoch
                    self._drafter_ids[length:] = ids
                    self._credit_end = len(self._drafter_ids)
                    self._since_rewind = 0
                case SetDeadline(at_ms=at_ms):
                    self._set_deadline(at_ms)
                case Emit(ids=ids):
                    self.emitted.extend(ids)
                case OpenSession(message=opening):
                    self._send(opening)
                case CloseSession(message=close):
                    self._send(close)
                case Finish():
                    self.finish = action

    def _set_deadline(self, at_ms: float | None) -> None:
        """One wake-up is enough for all deadlines that come after it: it asks for the next."""
        former, self._deadline_ms = self._deadline_ms, at_ms
        if at_ms is not None and (former is None or at_ms < former):
            self._timeline.at(at_ms, lambda: self._wake(at_ms))

    def _wake(self, due_ms: float) -> None:
        deadline_ms = self._deadline_ms
        if deadline_ms is None or self.finish is not None:
            return
        if deadline_ms > due_ms:
            self._timeline.at(deadline_ms, lambda: self._wake(deadline_ms))
            return
        self._deadline_ms = None
        self.feed(DeadlinePassed(self._timeline.now_ms))

    def _draft_on(self) -> None:
        step = (self._drafter_epoch, len(self._drafter_ids))
        if self._step == step or step[1] >= self._credit_end:
            return
        self._step = step  # one before it that a rewind made void is broken off
        draft_ms = self._draft_ms[min(self._since_rewind, len(self._draft_ms) - 1)]
        due_ms = self._timeline.now_ms + draft_ms
        self._timeline.at(due_ms, lambda: self._drafted(step))

    def _drafted(self, step: tuple[int, int]) -> None:
        epoch, position = step
        if self._step != step or (self._drafter_epoch, len(self._drafter_ids)) != step:
            return
        self._step = None
        pick = self._pair.draft(self._drafter_ids, self._since_rewind)
        self._drafter_ids.append(pick.id)
        self._since_rewind += 1
        now_ms = self._timeline.now_ms
        self.feed(TokenDrafted(epoch, position, pick.id, pick.confidence, now_ms, pick.entropy))
        self._draft_on()

    # ---- link

    def _send(self, message: Open | Batch | Close) -> None:
        self._outbox.append(message)
        if len(self._outbox) == 1:
            self._empty_outbox()

    def _empty_outbox(self) -> None:
        """Send what waits, one after the other; drafts that were dropped meanwhile never leave."""
        now_ms = self._timeline.now_ms
        while self._outbox:
            message = self._outbox[0]
            if isinstance(message, Batch) and message.epoch < self.session.epoch:
                self._outbox.popleft()
            elif self._uplink.free_ms > now_ms:
                self._timeline.at(self._uplink.free_ms, self._empty_outbox)
                return
            else:
                self._outbox.popleft()
                self._leave(message)

    def _leave(self, message: Open | Batch | Close) -> None:
        before, self._leaving = self._leaving, None
        if before is not None:  # and so it has left
            self._on_sent(before.num_bytes, before.ms)
        now_ms, num_bytes = self._timeline.now_ms, self._wire.num_bytes(0)
        if isinstance(message, Batch):
            num_bytes = self._wire.num_bytes(len(message.ids))
            self.session.metrics.uplink_bytes += num_bytes
        arrivals_ms = self._uplink.send(now_ms, num_bytes)
        if isinstance(message, Batch):
            takes_ms = self._uplink.free_ms - now_ms
            self._leaving = _Leaving(message.epoch, num_bytes, self._uplink.sends, takes_ms)
        for arrival_ms in arrivals_ms:
            self._timeline.at(arrival_ms, lambda: self._cloud_takes(message))

    def _break_off(self, batch: _Leaving) -> None:
        """Stop sending drafts that were dropped; what arrives of them the verifier ignores."""
        self._leaving = None
        if batch.number == self._uplink.sends:
            left = self._uplink.break_off(self._timeline.now_ms)
            self.session.metrics.uplink_bytes -= round((1.0 - left) * batch.num_bytes)
            if left == 1.0:
                self._on_sent(batch.num_bytes, batch.ms)
        self._empty_outbox()

    def _reply(self, verdict: Verdict) -> None:
        for arrival_ms in self._downlink.send(self._timeline.now_ms, self._wire.message_bytes):
            self._timeline.at(
                arrival_ms, lambda: self.feed(VerdictArrived(verdict, self._timeline.now_ms))
            )

    # ---- cloud

    def _cloud_takes(self, message: Open | Batch | Close) -> None:
        if isinstance(message, Close):
            self._cloud = None
        elif isinstance(message, Open):
            self._cloud = self._cloud or self._new_cloud()
            self._cloud_performs(self._cloud.handle(message))
        elif self._cloud is None:
            self._reply(
                Verdict(message.session, message.epoch, message.start, VerdictKind.UNKNOWN_SESSION)
            )
        else:
            self._cloud_performs(self._cloud.handle(message))

    def _cloud_performs(self, actions: list[CloudAction]) -> None:
        for action in actions:
            match action:
                case Reply(verdict=verdict):
                    self._reply(verdict)
                case Check(position=position, ids=ids):
                    self.checks += 1
                    self.checked_ids += len(ids)
                    self._held[position:] = ids
                    self._forward(len(ids), position)
                case Prefill(ids=ids):
                    self._held[:] = ids[:-1]
                    self._forward(0, 0)

    def _forward(self, num_ids: int, start: int) -> None:
        """Have a forward over the last `num_ids` held, from `start` on; none means a prefill."""
        self.forwards += 1
        cloud = self._cloud
        targets = self._pair.target_ids(self._held, start) if num_ids else []

        def done(cost_ms: float) -> None:
            if self._cloud is cloud and cloud is not None:
                event = Checked(targets, cost_ms) if num_ids else Prefilled(cost_ms)
                self._cloud_performs(cloud.handle(event))

        self._verifier.ask(num_ids, done)

    def die(self, death: Death, restored_ms: float) -> None:
        """The verifier forgets the session; the edge may hear of it, and of its return."""
        self._cloud = None
        if death.noticed:
            self.feed(LinkLost(self._timeline.now_ms))
            self._timeline.at(restored_ms, lambda: self.feed(LinkRestored(self._timeline.now_ms)))


def simulate(
    session: DraftSession,
    prompt: Ids,
    *,
    verifier: Callable[[], VerifySession],
    pair: Pair,
    link: LinkModel,
    costs: Costs,
    rng: np.random.Generator,
    deaths: Sequence[Death] = (),
    cancel_at_ms: float | None = None,
    learned: Learned | None = None,
    max_events: int = 1_000_000,
) -> Outcome:
    """Run one session to its finish over a faulty link, the same in both directions.

    `verifier` makes the cloud's half anew after each death. `learned` is that of the session's
    controller, whose slow work is done between events and takes no simulated time.

    Raises RuntimeError if the session has not finished after `max_events` events, or nothing is
    left to happen.
    """
    timeline = Timeline()
    client = Client(
        timeline,
        SharedVerifier(timeline, costs),
        session,
        prompt,
        new_cloud=verifier,
        pair=pair,
        uplink=Direction(link, rng),
        downlink=Direction(link, rng),
        draft_ms=(costs.draft_ms,),
        wire=IDS_ONLY,
    )
    for death in deaths:
        restored_ms = death.at_ms + link.phases[0].one_way_ms
        timeline.at(death.at_ms, partial(client.die, death, restored_ms))
    if cancel_at_ms is not None:
        timeline.at(cancel_at_ms, lambda: client.feed(Cancelled(timeline.now_ms)))
    client.start()
    run([client], timeline, [learned] if learned is not None else [], max_events)
    return client.outcome(0.0)


def run(
    clients: Sequence[Client],
    timeline: Timeline,
    learned: Sequence[Learned],
    max_events: int = 1_000_000,
) -> None:
    """Let things happen until all clients have finished. Raises RuntimeError if one does not."""
    under_way = [client for client in clients if client.finish is None]
    while under_way:
        run_until_one_finishes(under_way, timeline, learned, max_events)
        under_way = [client for client in under_way if client.finish is None]


def run_until_one_finishes(
    clients: Sequence[Client],
    timeline: Timeline,
    learned: Sequence[Learned],
    max_events: int = 1_000_000,
) -> None:
    """Let things happen until one of the clients has finished. Raises RuntimeError if none does."""
    for _ in range(max_events):
        if not timeline.step():
            break
        for each in learned:
            if each.setting_due:
                each.choose_setting()
        if any(client.finish is not None for client in clients):
            return
    raise RuntimeError(f"not finished after {timeline.now_ms} ms of simulated time")
