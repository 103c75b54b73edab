"""A scenario of the simulator from a YAML or JSON file, or by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policies.costs import BYTES_PER_ID, Costs, Wire
from policies.links import LinkModel, Phase
from policies.scenarios import (
    FULL_DISTRIBUTION_BYTES,
    SCENARIOS,
    TRUNCATED_DISTRIBUTION_BYTES,
    Scenario,
    mbit_per_s,
)

MAX_FILE_BYTES = 1 << 20
DRAFT_BYTES = {
    "ids": BYTES_PER_ID,
    "truncated": TRUNCATED_DISTRIBUTION_BYTES,
    "full": FULL_DISTRIBUTION_BYTES,
}


class ScenarioError(ValueError):
    """A scenario that is unknown or malformed; the message says which field and what it must be."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PhaseFields(_Fields):
    """How the link is for a time; phases follow each other, again and again."""

    rtt_ms: float = Field(ge=0.0)
    uplink_mbit_per_s: float | None = Field(None, gt=0.0)
    jitter_ms: float = Field(0.0, ge=0.0)
    down: bool = False
    lasts_s: float | None = Field(None, gt=0.0)


class ScenarioFields(_Fields):
    """What a scenario file may hold."""

    draft_ms: float | list[float]
    verify_ms: float = Field(30.0, gt=0.0)
    verify_ms_per_token: float = Field(0.0, ge=0.0)
    link: list[PhaseFields] = Field(min_length=1, max_length=100_000)
    messages: Literal["ids", "truncated", "full"] = "ids"
    one_request_at_a_time: bool = False
    overhead_ms: float = Field(0.0, ge=0.0)
    edge_target_ms: float | None = Field(None, gt=0.0)
    rates: list[float] | None = None

    def scenario(self) -> Scenario:
        """Raises ValueError naming what is out of range."""
        phases = tuple(
            Phase(
                phase.rtt_ms / 2.0,
                math.inf
                if phase.uplink_mbit_per_s is None
                else mbit_per_s(phase.uplink_mbit_per_s),
                phase.jitter_ms,
                phase.down,
                math.inf if phase.lasts_s is None else 1000.0 * phase.lasts_s,
            )
            for phase in self.link
        )
        single = not isinstance(self.draft_ms, list)
        return Scenario(
            draft_ms=(self.draft_ms,) if single else tuple(self.draft_ms),  # type: ignore[arg-type]
            verify=Costs(verify_ms=self.verify_ms, verify_ms_per_token=self.verify_ms_per_token),
            uplink=LinkModel(
                phases,
                overhead_ms=self.overhead_ms,
                one_request_at_a_time=self.one_request_at_a_time,
            ),
            wire=Wire(DRAFT_BYTES[self.messages], one_request_at_a_time=self.one_request_at_a_time),
            rates=None if self.rates is None else tuple(self.rates),
            edge_target_ms=self.edge_target_ms,
        )


def load(name_or_path: str) -> Scenario:
    """The scenario of that name, or in that file. Raises ScenarioError."""
    if name_or_path in SCENARIOS:
        return SCENARIOS[name_or_path]
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ScenarioError(f"{name_or_path!r} is neither a file nor one of {', '.join(SCENARIOS)}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ScenarioError(f"{path} has over {MAX_FILE_BYTES} bytes")
    try:
        return ScenarioFields.model_validate(yaml.safe_load(path.read_text())).scenario()
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}"
            for fault in error.errors()
        )
        raise ScenarioError(f"{path}: {faults}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ScenarioError(f"{path}: {error}") from error
