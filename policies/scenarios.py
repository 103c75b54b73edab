"""What the simulator plays: models' times, link and messages, as named rows of data.

PipeSD's four scenarios (§5.1) send whole draft distributions, one request after the other; the same
with `-ids` send ids over a connection that stays open. Draft times of the phone and the IoT device
are the laptop's by clock rate. UCB-SpecStop's suites have the published times and acceptances
(Tables I, II) in place of a trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from policies.costs import BYTES_PER_ID, IDS_ONLY, Costs, Wire
from policies.links import LinkModel, Phase, markov_phases

FULL_DISTRIBUTION_BYTES = 2.0 * 151_936  # half precision over the default pair's vocabulary
TRUNCATED_DISTRIBUTION_BYTES = BYTES_PER_ID + 64 * 6.0  # the 64 likeliest ids, each with its half


@dataclass(frozen=True, slots=True)
class Scenario:
    """One edge, one link, one verifier.

    `draft_ms`: of the j-th draft since the drafter last heard of the target; the last value holds
    from there on. `rates`: acceptance of the j-th draft, in place of a trace, likewise.
    `edge_target_ms`: a token of the target on the edge device, which edge-only decoding takes.
    """

    draft_ms: tuple[float, ...]
    verify: Costs  # its draft_ms is not used
    uplink: LinkModel
    wire: Wire = IDS_ONLY
    rates: tuple[float, ...] | None = None
    edge_target_ms: float | None = None

    def __post_init__(self) -> None:
        if not self.draft_ms or not all(0.0 < ms < math.inf for ms in self.draft_ms):
            raise ValueError(f"draft_ms must be finite and > 0, got {self.draft_ms}")
        if not self.verify.verify_ms > 0.0:
            raise ValueError(f"verify_ms must be > 0, got {self.verify.verify_ms}")
        if self.rates is not None and not (
            self.rates and all(0.0 <= rate <= 1.0 for rate in self.rates)
        ):
            raise ValueError(f"rates must be in [0, 1], at least one, got {self.rates}")

    @property
    def downlink(self) -> LinkModel:
        """Verdicts are small: the same delays, and no bytes to speak of."""
        phases = tuple(replace(phase, bytes_per_ms=math.inf) for phase in self.uplink.phases)
        return LinkModel(phases)

    @property
    def least_rtt_ms(self) -> float:
        """The round trip at the link's best."""
        return 2.0 * min(phase.one_way_ms for phase in self.uplink.phases if not phase.down)


def mbit_per_s(rate: float) -> float:
    """In bytes per millisecond."""
    return rate * 1e6 / 8.0 / 1000.0


def edge(
    draft_ms: float,
    rtt_ms: float,
    verify_ms: float = 30.0,
    *,
    wire: Wire = IDS_ONLY,
    mbit: tuple[float, ...] = (20.0,),
    switches_every_ms: float = math.inf,
) -> Scenario:
    """A scenario of one draft time, one delay and one bandwidth, or several in turn."""
    phases = tuple(
        Phase(rtt_ms / 2.0, mbit_per_s(rate), lasts_ms=switches_every_ms) for rate in mbit
    )
    return Scenario(
        draft_ms=(draft_ms,),
        verify=Costs(verify_ms=verify_ms),
        uplink=LinkModel(phases, one_request_at_a_time=wire.one_request_at_a_time),
        wire=wire,
        edge_target_ms=EDGE_TARGET_FACTOR * draft_ms,
    )


EDGE_TARGET_FACTOR = (
    2.3  # bytes of the default pair's files, which is what a token on the edge takes
)
LAPTOP_MS = 36.0
PHONE_MS = LAPTOP_MS * 5.1 / 2.5  # by clock rate, as PipeSD emulates it
IOT_MS = LAPTOP_MS * 5.1 / 1.2
DYNAMIC_MBIT = (20.0, 80.0, 10.0, 40.0, 60.0, 15.0, 70.0, 30.0)
PIPESD_WIRE = Wire(FULL_DISTRIBUTION_BYTES, one_request_at_a_time=True)
RTT_MS = 50.0


def _pipesd(wire: Wire, suffix: str) -> dict[str, Scenario]:
    devices = {"laptop": LAPTOP_MS, "phone": PHONE_MS, "iot": IOT_MS}
    scenarios = {
        f"{name}{suffix}": edge(draft_ms, RTT_MS, wire=wire) for name, draft_ms in devices.items()
    }
    scenarios[f"dynamic{suffix}"] = edge(
        LAPTOP_MS, RTT_MS, wire=wire, mbit=DYNAMIC_MBIT, switches_every_ms=20_000.0
    )
    return scenarios


@dataclass(frozen=True, slots=True)
class SpecStopSuite:
    """The measurements of one suite of UCB-SpecStop's testbed (Tables I and II)."""

    draft_ms_per_token: Mapping[int, float]  # c_d(k)
    verify_ms_per_token: Mapping[int, float]  # c_v(k), a round's verification being (k + 1)·c_v(k)
    prefix: Mapping[int, float]  # q̂(k)
    tail_rate: float  # α_geo
    base_rtt_ms: float
    mean_draft_ms: float  # c̄_d, of the theory oracle
    mean_verify_ms: float  # c̄_v
    target_factor: float  # parameters of the target, to the draft model's

    def draft_ms(self) -> tuple[float, ...]:
        """The time of the j-th draft of a round: the increments of k·c_d(k), linear in between."""
        known = [(0, 0.0), *((k, k * ms) for k, ms in self.draft_ms_per_token.items())]
        lengths, totals = zip(*known, strict=True)
        return tuple(np.diff(np.interp(range(lengths[-1] + 1), lengths, totals)).tolist())

    def verify(self) -> Costs:
        """(k + 1)·c_v(k) as a line over the ids of a forward."""
        ids = [k + 1.0 for k in self.verify_ms_per_token]
        times = [(k + 1.0) * ms for k, ms in self.verify_ms_per_token.items()]
        slope, intercept = np.polyfit(ids, times, 1).tolist()
        return Costs(verify_ms=intercept, verify_ms_per_token=max(0.0, slope))

    def rates(self) -> tuple[float, ...]:
        """P(j-th draft stands | those before it stand): q̂ falls at a constant rate in between."""
        known = [(0, 1.0), *self.prefix.items()]
        lengths, probs = zip(*known, strict=True)
        logs = np.interp(range(lengths[-1] + 1), lengths, np.log(probs))
        return (*np.exp(np.diff(logs)).tolist(), self.tail_rate)

    def scenario(self, one_way_ms: float, *, geometric: bool = False) -> Scenario:
        """The suite at an injected delay; `geometric` is Assumption 1, by the tail's rate."""
        return Scenario(
            draft_ms=self.draft_ms(),
            verify=self.verify(),
            uplink=LinkModel((Phase(self.base_rtt_ms / 2.0 + one_way_ms),)),
            rates=(self.tail_rate,) if geometric else self.rates(),
            # the device is bound by memory; whether the target fits there is another question
            edge_target_ms=self.target_factor * self.mean_draft_ms,
        )

    def markov(self, good_ms: float, bad_ms: float, mean_stay_ms: float, seed: int) -> Scenario:
        """The suite on a link that is good or bad for exponential times."""
        states = [Phase(self.base_rtt_ms / 2.0 + one_way) for one_way in (good_ms, bad_ms)]
        phases = markov_phases(states, mean_stay_ms, 3_600_000.0, np.random.default_rng(seed))
        return replace(self.scenario(good_ms), uplink=LinkModel(phases))


QWEN = SpecStopSuite(
    draft_ms_per_token={1: 106.25, 5: 79.46, 10: 73.70},
    verify_ms_per_token={1: 16.56, 5: 5.50, 10: 3.06},
    prefix={1: 0.462, 3: 0.256, 5: 0.188, 7: 0.144, 10: 0.082},
    tail_rate=0.828,
    base_rtt_ms=10.01,
    mean_draft_ms=85.14,
    mean_verify_ms=8.09,
    target_factor=7.6 / 0.49,
)
LLAMA = SpecStopSuite(
    draft_ms_per_token={1: 90.40, 5: 58.94, 10: 52.59},
    verify_ms_per_token={1: 17.18, 5: 5.78, 10: 3.12},
    prefix={1: 0.382, 3: 0.226, 5: 0.170, 7: 0.124, 10: 0.082},
    tail_rate=0.845,
    base_rtt_ms=9.02,
    mean_draft_ms=67.37,
    mean_verify_ms=8.37,
    target_factor=8.0 / 1.24,
)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        **_pipesd(PIPESD_WIRE, ""),
        **_pipesd(IDS_ONLY, "-ids"),
        "rtt50": edge(LAPTOP_MS, 50.0),
        "rtt300": edge(LAPTOP_MS, 300.0),
        "npu": edge(10.0, 50.0),
        "cloud70b": edge(LAPTOP_MS, 50.0, verify_ms=120.0),
        "specstop-qwen": QWEN.scenario(83.0),
        "specstop-llama": LLAMA.scenario(111.0),
        # ten rounds of a draft each per stay (§VI-F)
        "specstop-markov": QWEN.markov(37.0, 111.0, mean_stay_ms=3_000.0, seed=1),
    }
)
