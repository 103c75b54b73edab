"""How long a session bears silence: when to send again, give up, or do without the drafter."""

from __future__ import annotations

from dataclasses import dataclass

# a slow drafter's prefill; its first token may take this much longer than the others
_PREFILL_MS_PER_TOKEN = 20.0


@dataclass(slots=True)
class Patience:
    """The times of one session, in milliseconds. Of silences in a row each is borne longer.

    `progress_ms`: when the verifier was last idle, or told something new. `drafter_ms`: when the
    drafter was last idle, or drafted.
    """

    resend_after_ms: float
    give_up_after_ms: float
    drafter_timeout_ms: float
    progress_ms: float = 0.0
    drafter_ms: float = 0.0
    resend_ms: float = 0.0
    silences: int = 0  # of the verifier, in a row

    def sent(self, at_ms: float) -> None:
        """Something was sent that wants an answer."""
        self.resend_ms = at_ms + self.resend_after_ms * 2.0**self.silences

    def heard(self, at_ms: float) -> None:
        """The verifier answered."""
        self.silences = 0
        self.sent(at_ms)

    def gives_up(self, at_ms: float) -> bool:
        """Whether the verifier has told nothing new for too long."""
        return at_ms >= self.progress_ms + self.give_up_after_ms

    def verifier_deadline(self, link_down: bool) -> float:
        """When to act if the verifier stays silent; on a lost link nothing can be sent again."""
        give_up_ms = self.progress_ms + self.give_up_after_ms
        return give_up_ms if link_down else min(self.resend_ms, give_up_ms)

    def drafter_deadline(self, prefill_len: int) -> float:
        """When to do without a drafter that owes a token, `prefill_len` ids before its first."""
        return self.drafter_ms + self.drafter_timeout_ms + prefill_len * _PREFILL_MS_PER_TOKEN
