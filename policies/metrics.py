"""The figures of one session, by the definitions of ARCHITECTURE.md, "Words".

Everything is a count or a sum, so figures of several sessions add; rates are ratios of sums and
None where the denominator is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    verify_ms: float = 0.0  # verifier's own time in the forwards, as the verdicts report it
    started_ms: float = 0.0
    first_token_ms: float | None = None
    last_token_ms: float | None = None

    def count(self, origin: Origin, at_ms: float) -> None:
        """Count one committed token."""
        match origin:
            case Origin.ACCEPTED:
                self.accepted += 1
            case Origin.RECOVERED:
                self.recovered += 1
            case Origin.BONUS:
                self.bonus += 1
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
