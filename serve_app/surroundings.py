"""What a running system has measured: `GET /environment` tells it, `outrider plan` reads it."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from policies.costs import Costs, LinkCosts
from policies.crossover import Decision, Mode, Objective, Snapshot


class Surroundings(BaseModel):
    """The measured environment of one edge node, its method's objective and last decision."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True)

    draft_ms: float = Field(description="a draft token")
    verify_ms: float = Field(description="a forward of the verifier, whatever it is over")
    verify_ms_per_token: float = Field(description="and for each id of it")
    rtt_ms: float = Field(description="both ways, without the verifier's time")
    overhead_ms: float = Field(description="by which one message occupies the link")
    ms_per_byte: float
    nav_bytes: float = Field(description="a request for verification")
    acceptance_rate: float = Field(ge=0.0, le=1.0, description="accepted / judged draft tokens")
    draft_len: int = Field(ge=1, description="drafts of a NAV, the mean of the latest")
    max_navs_in_flight: int = Field(ge=1, description="NAVs that the window holds at that length")
    objective: Objective | None = Field(None, description="of the method; null: it always drafts")
    mode: Mode | None = Field(None, description="that the method has chosen; null: none yet")
    reason: str | None = Field(None, description="why, with what each mode is taken to need")

    def snapshot(self) -> Snapshot:
        """As `crossover` takes it. Raises ValueError naming a field out of range."""
        return Snapshot(
            Costs(self.draft_ms, self.verify_ms, self.verify_ms_per_token),
            LinkCosts(self.rtt_ms, self.overhead_ms, self.ms_per_byte),
            (self.acceptance_rate,),
            self.draft_len,
            self.max_navs_in_flight,
            self.nav_bytes,
        )

    @classmethod
    def of(cls, snapshot: Snapshot, objective: Objective | None, decision: Decision | None) -> Self:
        """Of a snapshot whose acceptance is one rate, and what the method makes of it."""
        (acceptance_rate,) = snapshot.prefix
        return cls(
            draft_ms=snapshot.costs.draft_ms,
            verify_ms=snapshot.costs.verify_ms,
            verify_ms_per_token=snapshot.costs.verify_ms_per_token,
            rtt_ms=snapshot.link.rtt_ms,
            overhead_ms=snapshot.link.overhead_ms,
            ms_per_byte=snapshot.link.ms_per_byte,
            nav_bytes=snapshot.nav_bytes,
            acceptance_rate=acceptance_rate,
            draft_len=snapshot.draft_len,
            max_navs_in_flight=snapshot.max_navs_in_flight,
            objective=objective,
            mode=None if decision is None else decision.mode,
            reason=None if decision is None else decision.reason,
        )
