"""Between a session and its control: asks for plans in time, and tells what came of them."""

from __future__ import annotations

from dataclasses import dataclass

from policies.control import (
    Answered,
    Committed,
    Control,
    DecodedOn,
    Drafted,
    Interrupted,
    Judged,
    NavSent,
    Plan,
    RoundEnded,
)
from policies.trigger import DraftSignal
from policies.types import Verdict, VerdictKind


@dataclass(frozen=True, slots=True)
class _SentNav:
    start: int  # of its drafts
    end: int
    sent_ids: int
    at_ms: float
    alone: bool


@dataclass(slots=True)
class _Round:
    began_ms: float
    committed: int  # length of the committed prefix then
    navs: int = 0
    draft_len: int = 0


class Rounds:
    """The plans of one session, and the NAVs that wait for their verdicts.

    Only what was sent once and answered by the same verifier is timed: after a resend or a re-open
    nobody knows which message a verdict answers. Positions are those of the session.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._plan: Plan | None = None
        self._round: _Round | None = None
        self._sent: list[_SentNav] = []
        self._told_ms: float | None = None  # when the last of the verdicts under way came
        self._distorted = 0  # so many of the next draft tokens came too early or too late

    def plan(self, committed: int, at_ms: float) -> Plan:
        """How the drafts after the last NAV go; the control is asked when the first may come."""
        if self._plan is None:
            self._plan = self._control.plan()
            if self._round is None:
                self._round = _Round(at_ms, committed)
        return self._plan

    def drafted(self, ms: float) -> None:
        if ms <= 0.0:
            return  # it came during a pause, as the one before it
        if self._distorted:
            self._distorted -= 1
        else:
            self._control.observe(Drafted(ms))

    def nav_sent(
        self, start: int, end: int, sent_ids: int, at_ms: float, *, alone: bool = True
    ) -> None:
        """A NAV over the drafts in [start, end) left; the drafts after it have a plan of theirs."""
        self._control.observe(NavSent(end - start))
        self._sent.append(_SentNav(start, end, sent_ids, at_ms, alone))
        self._plan = None
        if self._round is not None:
            self._round.navs += 1
            self._round.draft_len = end - start

    def judged(self, draft: DraftSignal, position: int, accepted: bool) -> None:
        self._control.observe(Judged(draft, position, accepted))

    def committed(self, count: int, at_ms: float) -> None:
        self._control.observe(Committed(count, at_ms))

    def answered(self, verdict: Verdict, at_ms: float) -> None:
        """A verdict brought the target's own token: after all drafts of a NAV, or for one of them.

        What the verifier decodes on by itself answers none.
        """
        previous_ms, self._told_ms = self._told_ms, at_ms
        judged = verdict.start + verdict.accepted
        inside = verdict.kind is VerdictKind.RECOVERED
        answers = next(
            (
                nav
                for nav in self._sent
                if (nav.start <= judged < nav.end if inside else nav.end == judged)
            ),
            None,
        )
        self._sent = [nav for nav in self._sent if nav.end > judged]
        if answers is None:
            # an answer whose NAV is no longer known has drafts, or a verdict from memory
            alone = verdict.kind is VerdictKind.BONUS and not verdict.accepted
            if alone and previous_ms is not None:
                self._control.observe(DecodedOn(at_ms - previous_ms, verdict.verify_ms))
            return
        self._control.observe(
            Answered(
                ms=at_ms - answers.at_ms,
                sent_ids=answers.sent_ids,
                forward_ids=max(1, answers.end - verdict.start + 1),
                verify_ms=verdict.verify_ms,
                draft_len=answers.end - answers.start,
                accepted=max(0, judged - answers.start),
                alone=answers.alone,
            )
        )

    def settled(self, committed: int, drafting: bool, at_ms: float) -> None:
        """No NAV is under way: the round is over, if it was one.

        With `drafting`, drafts of the next stretch are there already, and keep their plan.
        """
        ended, self._round = self._round, None
        if not drafting:
            self._plan = None
        if ended is not None and ended.navs == 1 and committed > ended.committed:
            ms, count = at_ms - ended.began_ms, committed - ended.committed
            self._control.observe(RoundEnded(ended.draft_len, ms, count))

    def dropped(self) -> None:
        """What was sent is void; the next drafts have a new plan."""
        self._sent.clear()
        self._told_ms = None
        self._plan = None

    def untimed(self) -> None:
        """What is under way waits for more than its verdict, so its times tell nothing."""
        self._sent.clear()
        self._told_ms = None
        self._round = None
        self._control.observe(Interrupted())

    def paused(self) -> None:
        """The client paused, and the session's clock with it, but neither drafter nor verifier."""
        # the first that came during it, which has its beginning for a time, and the first after it
        self._distorted = 2
        self.untimed()
