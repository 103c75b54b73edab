"""The figures of one session, by the definitions of ARCHITECTURE.md, "Words".

Everything is a count or a sum, so figures of several sessions add; rates are ratios of sums and
None where the denominator is zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from policies.types import Origin


@dataclass(slots=True)
class SessionMetrics:
    """Counters of one session. Times are milliseconds of the edge's clock."""

    drafted: int = 0  # draft tokens that the drafter produced
    accepted: int = 0  # of these, committed
    recovered: int = 0  # target tokens at a rejection
    bonus: int = 0  # target tokens after accepted drafts, or decoded on their own
    rounds: int = 0  # verdicts that committed something
    navs: int = 0  # NAVs requested, repeats not counted
    batches: int = 0  # token batches sent, NAVs included
    resends: int = 0  # messages repeated after silence or a gap
    reopens: int = 0
    rollbacks: int = 0
    # by position in its NAV: drafts accepted, and drafts judged at all; lists of equal length
    accepted_at: list[int] = field(default_factory=list)
    judged_at: list[int] = field(default_factory=list)
    uplink_bytes: int = 0  # of Opens and Batches
    downlink_bytes: int = 0  # of its verdicts
    verify_ms: float = 0.0  # verifier's own time in the forwards, as the verdicts report it
    started_ms: float = 0.0
    first_token_ms: float | None = None
    last_token_ms: float | None = None

    def count(self, origin: Origin, judged: int | None, at_ms: float) -> None:
        """Count one committed token.

        `judged` is the position in its NAV of the draft that the token confirms or replaces; None
        if there was no draft.
        """
        match origin:
            case Origin.ACCEPTED:
                self.accepted += 1
            case Origin.RECOVERED:
                self.recovered += 1
            case Origin.BONUS:
                self.bonus += 1
        if judged is not None:
            missing = judged + 1 - len(self.judged_at)
            self.judged_at.extend([0] * missing)
            self.accepted_at.extend([0] * missing)
            self.judged_at[judged] += 1
            self.accepted_at[judged] += origin is Origin.ACCEPTED
        if self.first_token_ms is None:
            self.first_token_ms = at_ms
        self.last_token_ms = at_ms

    @property
    def committed(self) -> int:
        """Tokens delivered."""
        return self.accepted + self.recovered + self.bonus

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted, bonus apart; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_len(self) -> float | None:
        """Committed tokens per NAV requested."""
        return self.committed / self.navs if self.navs else None

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_ms is None else self.first_token_ms - self.started_ms

    @property
    def tpt_ms(self) -> float | None:
        """Total generation time / committed tokens: a ratio of sums, prefill included."""
        if self.last_token_ms is None or not self.committed:
            return None
        return (self.last_token_ms - self.started_ms) / self.committed

    @classmethod
    def total(cls, runs: Iterable[SessionMetrics]) -> SessionMetrics:
        """The sum of several sessions; its `ttft_ms` is the first token's of all of them.

        Its `tpt_ms` is the sum of the generation times / the sum of the committed tokens.
        """
        total = cls()
        lasted_ms = 0.0
        for run in runs:
            for name in _SUMS:
                setattr(total, name, getattr(total, name) + getattr(run, name))
            for name in ("accepted_at", "judged_at"):
                pairs = zip_longest(getattr(total, name), getattr(run, name), fillvalue=0)
                setattr(total, name, [a + b for a, b in pairs])
            if run.ttft_ms is not None and run.last_token_ms is not None:
                first_ms = total.first_token_ms
                total.first_token_ms = (
                    run.ttft_ms if first_ms is None else min(first_ms, run.ttft_ms)
                )
                lasted_ms += run.last_token_ms - run.started_ms
                total.last_token_ms = lasted_ms
        return total


_SUMS = (
    "drafted",
    "accepted",
    "recovered",
    "bonus",
    "rounds",
    "navs",
    "batches",
    "resends",
    "reopens",
    "rollbacks",
    "uplink_bytes",
    "downlink_bytes",
    "verify_ms",
)
