"""Every method of the papers, and ours, as a row of data: a configuration, not a fork of the code.

Numbers without a source are defaults to be tuned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from policies.crossover import Objective, check_objective
from policies.session import SessionConfig
from policies.thresholds import Bounds, Setting
from policies.trigger import FixedTrigger

TriggerKind = Literal["fixed", "token", "sequence", "dual", "entropy", "price"]
Batches = Literal["nav", "each", "planned"]
Learner = Literal[
    "none",
    "dynamic-threshold",
    "autotune",
    "greedy",
    "theory",
    "calibrated",
    "best-fixed",
    "ucb",
    "ucb-contextual",
    "naive-ucb",
    "exp3",
]

ORACLES: frozenset[Learner] = frozenset({"greedy", "theory", "calibrated", "best-fixed"})
# that choose a draft length per round, and so need rounds: one NAV at a time
LENGTH_LEARNERS: frozenset[Learner] = ORACLES | {"ucb", "ucb-contextual", "naive-ucb", "exp3"}


@dataclass(frozen=True, slots=True)
class Method:
    """How a session drafts, sends and learns.

    `draft_len`: drafts per NAV; for every trigger but `fixed`, and for a learner of lengths, the
    most. `batches`: drafts leave with their NAV, each at once, or by PipeSD's schedule. `learner`:
    what adapts, see `controller.py`. `objective`: by what a session goes over to decoding by the
    target alone and back (`crossover.choose`); None: it always drafts. Raises ValueError naming
    what does not go together.
    """

    trigger: TriggerKind = "fixed"
    draft_len: int = 4
    token_threshold: float = 0.5  # token, dual
    sequence_threshold: float = 0.3  # sequence, dual
    rejection_threshold: float = 0.3  # entropy
    nav_price_ms: float = 30.0  # price
    max_window: int = 16
    max_navs_in_flight: int = 1
    draft_while_waiting: bool = False
    batches: Batches = "nav"
    learner: Learner = "none"
    speculate: bool = True
    objective: Objective | None = None

    def __post_init__(self) -> None:
        if self.draft_len < 1 or self.max_window < self.draft_len:
            raise ValueError(
                f"draft_len must be in [1, max_window = {self.max_window}], got {self.draft_len}"
            )
        overlapping = self.draft_while_waiting or self.max_navs_in_flight > 1
        if self.learner in LENGTH_LEARNERS and (overlapping or self.trigger != "fixed"):
            raise ValueError(
                f"learner {self.learner!r} chooses the length of rounds: it needs trigger 'fixed', "
                "max_navs_in_flight 1 and no draft_while_waiting"
            )
        self._check_objective()
        if not 0.0 <= self.nav_price_ms < math.inf:
            raise ValueError(f"nav_price_ms must be finite and >= 0, got {self.nav_price_ms}")
        start = Setting(self.sequence_threshold, self.token_threshold)
        if self.learner == "autotune" and not Bounds().contains(start):
            raise ValueError(f"thresholds must lie within {Bounds()}, got {start}")
        wanted = {"dynamic-threshold": "sequence", "autotune": "dual"}.get(self.learner)
        if wanted is not None and self.trigger != wanted:
            raise ValueError(f"learner {self.learner!r} needs trigger {wanted!r}")

    def _check_objective(self) -> None:
        if self.objective is None:
            return
        check_objective(self.objective)
        if self.learner in LENGTH_LEARNERS or not self.speculate:
            raise ValueError(
                f"objective {self.objective!r} chooses between drafting and not: it needs "
                "speculate, and no learner that chooses lengths, which may be 0"
            )

    def session_config(self) -> SessionConfig:
        """What the session itself needs to know; its plans come from a `Controller`."""
        return SessionConfig(
            trigger=FixedTrigger(self.draft_len),
            max_window=self.max_window,
            max_navs_in_flight=self.max_navs_in_flight,
            draft_while_waiting=self.draft_while_waiting,
            speculate=self.speculate,
        )


# drafts while it waits, and sends by the schedule; at most its first N̂, 20, wait for a verdict.
# Twice that would suit it better where messages are ids (RTT 300: by 5 %), and worse where whole
# distributions fill the uplink, for which it is made.
_PIPELINED = Method(draft_len=20, max_window=20, draft_while_waiting=True, batches="planned")
_DUAL = Method(
    trigger="dual",
    draft_len=20,
    sequence_threshold=0.5,
    token_threshold=0.5,
    max_window=20,
    learner="autotune",
)
_SLIDING = Method(
    trigger="price",
    draft_len=32,
    max_window=64,
    max_navs_in_flight=32,
    draft_while_waiting=True,
)


def _arms(learner: Learner) -> Method:
    return Method(draft_len=10, learner=learner)


METHODS = MappingProxyType(
    {
        "cloud-only": Method(speculate=False),
        "vanilla": Method(draft_len=4),
        "hsl": Method(trigger="token", draft_len=16, token_threshold=0.7),
        "edgellm": Method(
            trigger="sequence",
            draft_len=16,
            max_window=32,
            draft_while_waiting=True,
            learner="dynamic-threshold",
        ),
        "pipesd": replace(_DUAL, draft_while_waiting=True, batches="planned"),
        "pipesd-no-pipeline": _DUAL,
        "pipesd-fixed": replace(_PIPELINED, draft_len=6),
        "pipesd-token": replace(_PIPELINED, trigger="token"),
        "pipesd-sequence": replace(_PIPELINED, trigger="sequence"),
        "specdecpp": Method(trigger="entropy", draft_len=16),
        "greedy": _arms("greedy"),
        "theory-oracle": _arms("theory"),
        "calibrated-oracle": _arms("calibrated"),
        "best-fixed": _arms("best-fixed"),
        "ucb": _arms("ucb"),
        "ucb-contextual": _arms("ucb-contextual"),
        "naive-ucb": _arms("naive-ucb"),
        "exp3": _arms("exp3"),
        "outrider": _SLIDING,
        "auto": replace(_SLIDING, objective="latency"),
        "outrider-p0": replace(_SLIDING, nav_price_ms=0.0, max_navs_in_flight=64),
    }
)
