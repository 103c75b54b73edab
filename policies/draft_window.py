"""The sequence of one session: prompt, committed ids, and then drafts without a verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.trigger import DraftSignal
from policies.types import Ids


@dataclass(slots=True)
class DraftWindow:
    """Positions are indices into `ids`: committed <= nav_end <= sent <= len(ids)."""

    ids: list[int]
    committed: int  # ids before this are the target's own
    sent: int  # ids before this were sent in this epoch
    nav_end: int  # ids before this are covered by a NAV of this epoch
    period_start: int  # where the schedule of token batches began
    signals: list[DraftSignal] = field(default_factory=list)  # of the drafts

    @classmethod
    def after(cls, prompt: Ids) -> DraftWindow:
        """The prompt, and nothing drafted."""
        length = len(prompt)
        return cls(list(prompt), length, length, length, length)

    @property
    def since_nav(self) -> list[DraftSignal]:
        """The drafts that no NAV covers."""
        return self.signals[self.nav_end - self.committed :]

    def draft(self, token_id: int, signal: DraftSignal) -> None:
        """One more draft."""
        self.ids.append(token_id)
        self.signals.append(signal)

    def commit(self, count: int) -> Ids:
        """Make the first `count` ids of the window the target's own; returns them."""
        ids = tuple(self.ids[self.committed : self.committed + count])
        self.committed += count
        del self.signals[:count]
        del self.signals[len(self.ids) - self.committed :]
        if self.sent < self.committed:
            self.sent = self.period_start = self.committed
        self.nav_end = max(self.nav_end, self.committed)
        return ids

    def nav_requested(self, end: int) -> None:
        """A NAV of the drafts up to `end`; the schedule of batches begins anew behind it."""
        self.nav_end = self.period_start = end

    def begin_epoch(self) -> None:
        """Nothing of the window was sent in this epoch."""
        self.sent = self.nav_end = self.period_start = self.committed
