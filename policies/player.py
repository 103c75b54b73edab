"""Plays a method in a scenario: request after request, or several clients on one verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.controller import Controller, Learned
from policies.links import Direction
from policies.methods import Method
from policies.metrics import SessionMetrics
from policies.replay import RenewalPair, ReplayPair
from policies.scenarios import Scenario
from policies.session import DraftSession
from policies.simulate import Client, SharedVerifier, Timeline, run, run_until_one_finishes
from policies.types import SamplingParams
from policies.verify_session import VerifySession

AnyPair = ReplayPair | RenewalPair

CONTEXT = 1 << 20
VOCABULARY = 1 << 20
CLOUD_WINDOW = 256


@dataclass(frozen=True, slots=True)
class Figures:
    """What some requests took; sums, so that figures add, and ratios of sums."""

    tokens: int
    ms: float  # from each request's start to its last token
    navs: int  # forwards of the verifier, prefills apart
    verified: int  # ids fed in these
    uplink_bytes: int  # of token batches
    verifier_ms: float
    metrics: SessionMetrics  # of all requests together

    @property
    def tpt_ms(self) -> float:
        """Generation time / committed tokens."""
        return self.ms / self.tokens

    @property
    def navs_per_token(self) -> float:
        """Forwards of the verifier / committed tokens: merged requests count once."""
        return self.navs / self.tokens

    @property
    def verified_per_token(self) -> float:
        """Ids that the verifier was fed / committed tokens."""
        return self.verified / self.tokens

    @property
    def bytes_up_per_token(self) -> float:
        """Bytes of token batches / committed tokens."""
        return self.uplink_bytes / self.tokens


class Player:
    """One edge node of a scenario under a method; what it learns stays, and its time goes on.

    `learned` and the two directions of the link may be replaced before it plays.

    Prefills take no time, since no method changes them. Raises AssertionError if an answer is not
    the pair's own target's.
    """

    def __init__(
        self,
        scenario: Scenario,
        method: Method,
        *,
        seed: int = 0,
        timeline: Timeline | None = None,
        verifier: SharedVerifier | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.learned = Learned(method, seed=seed, wire=scenario.wire)
        self.timeline = timeline or Timeline()
        self.verifier = verifier or SharedVerifier(self.timeline, scenario.verify, prefill_ms=0.0)
        self._scenario, self._method = scenario, method
        self.uplink = Direction(scenario.uplink, rng)
        self.downlink = Direction(scenario.downlink, rng)
        self._requests = 0

    def play(self, pairs: Sequence[AnyPair], end_ids: frozenset[int] = frozenset()) -> Figures:
        """Generate each pair's answer, one request after the other."""
        busy_ms = self.verifier.busy_ms
        clients = []
        for pair in pairs:
            client = self.request(pair, end_ids)
            client.start()
            run([client], self.timeline, [self.learned])
            check_answer(client, pair)
            clients.append(client)
        return figures(clients, self.verifier.busy_ms - busy_ms)

    def request(self, pair: AnyPair, end_ids: frozenset[int] = frozenset()) -> Client:
        """A client that has not begun."""
        name = str(self._requests)
        self._requests += 1
        session = DraftSession(
            name,
            pair.prompt,
            sampling=SamplingParams(stop_ids=end_ids),
            max_tokens=pair.max_tokens,
            draft_context=CONTEXT,
            target_context=CONTEXT,
            config=self._method.session_config(),
            control=Controller(self.learned),
        )
        return Client(
            self.timeline,
            self.verifier,
            session,
            pair.prompt,
            new_cloud=lambda: VerifySession(
                name, context=CONTEXT, vocab_size=VOCABULARY, max_window=CLOUD_WINDOW
            ),
            pair=pair,
            uplink=self.uplink,
            downlink=self.downlink,
            draft_ms=self._scenario.draft_ms,
            wire=self._scenario.wire,
            on_sent=self.learned.monitor.observe_send,
        )


def play_together(
    players: Sequence[Player],
    lists: Sequence[Sequence[AnyPair]],
    end_ids: frozenset[int] = frozenset(),
) -> list[Figures]:
    """Each player's requests one after the other, all players at once, on their one verifier.

    Figures are in the order of the players. Their `navs` count a forward once for each session that
    has a part in it, their `verifier_ms` is of all together. Raises ValueError unless the players
    share timeline and verifier and each has a list.
    """
    shared = {(id(player.timeline), id(player.verifier)) for player in players}
    if len(shared) != 1 or len(lists) != len(players):
        raise ValueError(
            f"players must share timeline and verifier and have a list each, got {len(players)} "
            f"players and {len(lists)} lists"
        )
    timeline, verifier = players[0].timeline, players[0].verifier
    learned, busy_ms = [player.learned for player in players], verifier.busy_ms
    clients: list[list[Client]] = [[] for _ in players]
    while True:
        for player, pairs, own in zip(players, lists, clients, strict=True):
            if len(own) < len(pairs) and (not own or own[-1].finish is not None):
                own.append(player.request(pairs[len(own)], end_ids))
                own[-1].start()
        under_way = [own[-1] for own in clients if own and own[-1].finish is None]
        if not under_way:
            break
        run_until_one_finishes(under_way, timeline, learned)
    for pairs, own in zip(lists, clients, strict=True):
        for pair, client in zip(pairs, own, strict=True):
            check_answer(client, pair)
    return [figures(own, verifier.busy_ms - busy_ms) for own in clients]


def check_answer(client: Client, pair: AnyPair) -> None:
    """Raises AssertionError unless the client was given what the target alone would write."""
    assert tuple(client.emitted) == pair.answer, "the answer is not the target's own"


def figures(clients: Sequence[Client], verifier_ms: float) -> Figures:
    """The sums over requests that have finished."""
    total = SessionMetrics.total(client.session.metrics for client in clients)
    return Figures(
        tokens=total.committed,
        ms=sum(
            client.session.metrics.tpt_ms * client.session.metrics.committed
            for client in clients
            if client.session.metrics.tpt_ms is not None
        ),
        navs=sum(client.checks for client in clients),
        verified=sum(client.checked_ids for client in clients),
        uplink_bytes=total.uplink_bytes,
        verifier_ms=verifier_ms,
        metrics=total,
    )
