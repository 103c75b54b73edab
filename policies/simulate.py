"""The two halves of the protocol, joined over a simulated link: a discrete-event simulation.

No clock and no hidden randomness: time is the simulation's own, every draw comes from the given
generator. Models are functions of the ids so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from policies.controller import Learned
from policies.costs import Costs
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
from policies.metrics import SessionMetrics
from policies.session import DraftSession
from policies.types import Batch, Close, Ids, Open, Verdict, VerdictKind
from policies.verify_session import VerifySession

TargetModel = Callable[[Sequence[int]], int]
DraftModel = Callable[[Sequence[int]], tuple[int, float]]


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction of a link. Jitter is exponential, so it reorders; rates are probabilities."""

    one_way_ms: float = 25.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0

    def arrivals(self, at_ms: float, rng: np.random.Generator) -> list[float]:
        """When a message sent at `at_ms` arrives: never, once or twice."""
        if rng.random() < self.loss:
            return []
        copies = 2 if rng.random() < self.duplication else 1
        return [at_ms + self.one_way_ms + rng.exponential(self.jitter_ms) for _ in range(copies)]


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
    forwards: int


class _Simulation:
    def __init__(
        self,
        session: DraftSession,
        verifier: Callable[[], VerifySession],
        target: TargetModel,
        draft: DraftModel,
        link: LinkModel,
        costs: Costs,
        rng: np.random.Generator,
        learned: Learned | None,
    ) -> None:
        self.session, self.new_verifier, self.rng = session, verifier, rng
        self.target, self.draft, self.link, self.costs = target, draft, link, costs
        self.learned = learned
        self.now_ms = 0.0
        self.emitted: list[int] = []
        self.forwards = 0
        self.finish: Finish | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._cloud: VerifySession | None = None
        self._held: list[int] = []  # the verifier engine's ids
        self._deadline_ms: float | None = None
        self._drafter_ids: list[int] = []
        self._drafter_epoch = self._credit_end = 0
        self._drafting = False

    def at(self, at_ms: float, action: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (at_ms, self._scheduled, action))

    def run(self, prompt: Ids, max_events: int) -> None:
        self._drafter_ids = list(prompt)
        self.perform(self.session.start(0.0))
        for _ in range(max_events):
            if self.finish is not None or not self._queue:
                return
            self.now_ms, _, action = heapq.heappop(self._queue)
            action()
            if self.learned is not None and self.learned.setting_due:
                self.learned.choose_setting()

    # ---- edge

    def feed(self, event: EdgeEvent) -> None:
        self.perform(self.session.handle(event))

    def perform(self, actions: list[EdgeAction]) -> None:
        for action in actions:
            match action:
                case OpenSession(message=message) | SendBatch(message=message):
                    self._uplink(message)
                case CloseSession(message=message):
                    self._uplink(message)
                case RewindDrafter(epoch=epoch, length=length, ids=ids):
                    self._drafter_epoch = epoch
                    self._drafter_ids[length:] = ids
                    self._credit_end = len(self._drafter_ids)
                case GrantDraft(start=start, count=count):
                    self._credit_end = start + count
                    self._draft_on()
                case SetDeadline(at_ms=at_ms):
                    self._deadline_ms = at_ms
                    if at_ms is not None:
                        self.at(at_ms, lambda: self.feed(DeadlinePassed(self.now_ms)))
                case Emit(ids=ids):
                    self.emitted.extend(ids)
                case Finish():
                    self.finish = action

    def _draft_on(self) -> None:
        if self._drafting or len(self._drafter_ids) >= self._credit_end:
            return
        self._drafting = True
        epoch, length = self._drafter_epoch, len(self._drafter_ids)
        self.at(self.now_ms + self.costs.draft_ms, lambda: self._drafted(epoch, length))

    def _drafted(self, epoch: int, position: int) -> None:
        self._drafting = False
        if (epoch, position) == (self._drafter_epoch, len(self._drafter_ids)):
            token_id, confidence = self.draft(self._drafter_ids)
            self._drafter_ids.append(token_id)
            self.feed(TokenDrafted(epoch, position, token_id, confidence, self.now_ms))
        self._draft_on()

    # ---- link

    def _uplink(self, message: Open | Batch | Close) -> None:
        for arrival_ms in self.link.arrivals(self.now_ms, self.rng):
            self.at(arrival_ms, lambda: self._cloud_takes(message))

    def _downlink(self, verdict: Verdict) -> None:
        for arrival_ms in self.link.arrivals(self.now_ms, self.rng):
            self.at(arrival_ms, lambda: self.feed(VerdictArrived(verdict, self.now_ms)))

    # ---- cloud

    def _cloud_takes(self, message: Open | Batch | Close) -> None:
        if isinstance(message, Close):
            self._cloud = None
        elif isinstance(message, Open):
            self._cloud = self._cloud or self.new_verifier()
            self._cloud_performs(self._cloud.handle(message))
        elif self._cloud is None:
            self._downlink(
                Verdict(message.session, message.epoch, message.start, VerdictKind.UNKNOWN_SESSION)
            )
        else:
            self._cloud_performs(self._cloud.handle(message))

    def _cloud_performs(self, actions: list[CloudAction]) -> None:
        for action in actions:
            match action:
                case Reply(verdict=verdict):
                    self._downlink(verdict)
                case Prefill(ids=ids):
                    self._forward(list(ids[:-1]), [])
                case Check(position=position, ids=ids):
                    self._forward(self._held[:position], list(ids))

    def _forward(self, prefix: list[int], ids: list[int]) -> None:
        """Run one forward over `ids` after `prefix`; no ids means a prefill of the prefix."""
        self.forwards += 1
        cloud = self._cloud
        cost_ms = self.costs.verify_ms + self.costs.verify_ms_per_token * len(ids)
        self._held = prefix + ids
        targets = [self.target(self._held[: len(prefix) + i + 1]) for i in range(len(ids))]

        def done() -> None:
            if self._cloud is cloud and cloud is not None:
                event = Checked(targets, cost_ms) if ids else Prefilled(cost_ms)
                self._cloud_performs(cloud.handle(event))

        self.at(self.now_ms + cost_ms, done)

    def die(self, death: Death) -> None:
        self._cloud = None
        if death.noticed:
            self.feed(LinkLost(self.now_ms))
            restored_ms = self.now_ms + self.link.one_way_ms
            self.at(restored_ms, lambda: self.feed(LinkRestored(self.now_ms)))


def simulate(
    session: DraftSession,
    prompt: Ids,
    *,
    verifier: Callable[[], VerifySession],
    target: TargetModel,
    draft: DraftModel,
    link: LinkModel,
    costs: Costs,
    rng: np.random.Generator,
    deaths: Sequence[Death] = (),
    cancel_at_ms: float | None = None,
    learned: Learned | None = None,
    max_events: int = 1_000_000,
) -> Outcome:
    """Run one session to its finish over a faulty link.

    `verifier` makes the cloud's half anew after each death. `learned` is that of the session's
    controller, whose slow work is done between events and takes no simulated time.

    Raises RuntimeError if the session has not finished after `max_events` events, or nothing is
    left to happen.
    """
    simulation = _Simulation(session, verifier, target, draft, link, costs, rng, learned)
    for death in deaths:
        simulation.at(death.at_ms, lambda death=death: simulation.die(death))  # type: ignore[misc]
    if cancel_at_ms is not None:
        simulation.at(cancel_at_ms, lambda: simulation.feed(Cancelled(simulation.now_ms)))
    simulation.run(prompt, max_events)
    if simulation.finish is None:
        raise RuntimeError(f"not finished after {simulation.now_ms} ms of simulated time")
    return Outcome(
        tuple(simulation.emitted),
        simulation.finish,
        session.metrics,
        simulation.now_ms,
        simulation.forwards,
    )
