"""Edge-only, cloud-only or collaborative: what each would take, which to use, and why.

The output is the target's own in every mode, so edge-only means that the target itself runs on the
edge device, not that the draft model answers. Cloud-only is `decode_on`, one forward per token, its
verdicts streamed: the round trip is paid once per answer. Collaborative is drafting at the edge.

Predicted is one session's steady state on a verifier of its own: opening, prefill and the first
round trip are left out, and the load of others shows only in the measured `verify_ms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from policies.costs import Costs, LinkCosts

Floats = npt.NDArray[np.float64]
Objective = Literal["latency", "cost"] | float

MAX_MS = 1e9  # no sum of so many milliseconds overflows
RUN_LEN = 1024  # drafts after which a run ends at the latest, as an answer does
LOYALTY = 0.05  # the mode in use stays unless another is better by this share


class Mode(StrEnum):
    EDGE_ONLY = "edge-only"
    CLOUD_ONLY = "cloud-only"
    COLLABORATIVE = "collaborative"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of one session's surroundings.

    `prefix[j - 1]` is the probability that the first j drafts after a token of the target's all
    stand (`stopping.empirical_prefix`). Past its end the curve falls at its mean rate, so a single
    value is an acceptance rate. No values: there is no drafter, or nothing is known of it.

    A NAV is asked for after every `draft_len` drafts. With `max_navs_in_flight` = 1 the drafter
    rests while it waits; with more the window holds draft_len · max_navs_in_flight drafts.

    Raises ValueError naming a field that is NaN, infinite, negative or above `MAX_MS`, and for a
    curve that leaves [0, 1] or rises.
    """

    costs: Costs
    link: LinkCosts
    prefix: tuple[float, ...]
    draft_len: int
    max_navs_in_flight: int
    nav_bytes: float = 200.0  # on the uplink; ids only
    edge_target_ms: float | None = None  # a token of the target on the edge; None: no room for it

    def __post_init__(self) -> None:
        for values, names in (
            (self.costs, ("draft_ms", "verify_ms", "verify_ms_per_token")),
            (self.link, ("rtt_ms", "overhead_ms", "ms_per_byte")),
            (self, ("nav_bytes", "edge_target_ms")),
        ):
            for name in names:
                value = getattr(values, name)
                if value is not None and not 0.0 <= value <= MAX_MS:
                    raise ValueError(f"{name} must be in [0, {MAX_MS:g}], got {value}")
        for name in ("draft_len", "max_navs_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        # written so that NaN fails
        if not all(
            1.0 >= before >= after >= 0.0 for before, after in pairwise((1.0, *self.prefix))
        ):
            raise ValueError(f"prefix must fall within [0, 1] and never rise, got {self.prefix}")

    @property
    def sending_ms(self) -> float:
        """How long one NAV occupies the link."""
        return self.link.overhead_ms + self.nav_bytes * self.link.ms_per_byte

    def forward_ms(self, num_ids: int) -> float:
        """A forward of the verifier over so many ids, v0 + v1·n."""
        return self.costs.verify_ms + self.costs.verify_ms_per_token * num_ids


@dataclass(frozen=True, slots=True)
class Prediction:
    """Both per committed token: what the user waits, and what the verifier works."""

    mode: Mode
    tpt_ms: float
    verifier_ms_per_token: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The mode to use, what was predicted for each possible one, and the reason in a sentence."""

    mode: Mode
    predictions: tuple[Prediction, ...]
    reason: str


def choose(snapshot: Snapshot, objective: Objective, current: Mode | None = None) -> Decision:
    """The mode that is best by the objective.

    "latency" is the lowest TPT. "cost" is the least verifier time per token, which is none at all
    for edge-only, however slow, wherever the target fits there. A number is a price: the lowest
    tpt_ms + price · verifier_ms_per_token. Ties go to the lower TPT, then to less verifier time.
    The mode in use, `current`, stays unless another is better by more than `LOYALTY`, lest noise
    in the measurements switches to and fro. Raises ValueError for any other objective.
    """
    return decide(predict(snapshot), objective, current)


def decide(
    predictions: tuple[Prediction, ...], objective: Objective, current: Mode | None = None
) -> Decision:
    """What `choose` does with its predictions, of which there must be one."""
    scores = {
        prediction.mode: (
            score(prediction, objective),
            prediction.tpt_ms,
            prediction.verifier_ms_per_token,
        )
        for prediction in predictions
    }
    best = mode = min(scores, key=lambda mode: scores[mode])
    if current in scores and scores[current][0] * (1.0 - LOYALTY) <= scores[best][0]:
        mode = current
    return Decision(mode, predictions, _reason(mode, best, predictions, objective))


def predict(snapshot: Snapshot) -> tuple[Prediction, ...]:
    """What each possible mode takes. Edge-only needs the target there, collaborative a drafter."""
    alone_ms = snapshot.forward_ms(1)
    # the verdicts share one stream, on which each is a message
    predictions = [
        Prediction(Mode.CLOUD_ONLY, max(alone_ms, snapshot.link.overhead_ms), alone_ms),
    ]
    if snapshot.prefix:
        predictions.append(predict_collaborative(snapshot))
    if snapshot.edge_target_ms is not None:
        predictions.append(Prediction(Mode.EDGE_ONLY, snapshot.edge_target_ms, 0.0))
    return tuple(predictions)


def predict_collaborative(snapshot: Snapshot) -> Prediction:
    """What drafting at the edge takes, in rounds or with a window, as the snapshot says.

    With a constant acceptance rate a, drafts of d ms, k of them per NAV, a round trip r and
    forwards of v ms, one NAV at a time takes (k·d + r + v) / B(k), B(k) = (1 - a^(k+1)) / (1 - a).
    The window, if it never fills, the verifier keeps up and r + v >= k·d, takes
    (1 - a) · (k·d · (1 + a^(k+1) / (1 - a^k)) + r + v): with k = 1 nearly a·d + (1 - a) ·
    (r + v), a draft step where a draft stands and a round trip where one falls. A full window
    of w NAVs moves on by k·w drafts per round trip; a verifier slower than the drafter takes what
    has come meanwhile into its next forward. Raises ValueError without a prefix.
    """
    if not snapshot.prefix:
        raise ValueError("prefix must have a value to predict drafting from, got none")
    if snapshot.max_navs_in_flight == 1:
        return _one_nav_at_a_time(snapshot)
    return _sliding_window(snapshot)


def _one_nav_at_a_time(snapshot: Snapshot) -> Prediction:
    draft_len = snapshot.draft_len
    committed = float(_prefix_probs(snapshot.prefix, draft_len).sum())
    forward_ms = snapshot.forward_ms(draft_len + 1)
    answer_ms = snapshot.sending_ms + snapshot.link.rtt_ms + forward_ms
    round_ms = draft_len * snapshot.costs.draft_ms + answer_ms
    return Prediction(Mode.COLLABORATIVE, round_ms / committed, forward_ms / committed)


def _sliding_window(snapshot: Snapshot) -> Prediction:
    """A mean over runs. A run starts after a recovered token and ends with the next one.

    Nothing in a run is uncertain but its end, so the mean is a sum over the NAV whose verdict ends
    it. That is the first NAV to reach the draft before the bad one, since with k good drafts comes
    the target's own next token, and refutes the next draft already.
    """
    num_navs = math.ceil(RUN_LEN / snapshot.draft_len)
    run = _unbroken_run(snapshot, num_navs)
    told_ms = np.array(run.told_ms[:num_navs])
    drafts_stand = _prefix_probs(snapshot.prefix, run.ends[num_navs - 1])
    goes_on = drafts_stand[np.array(run.ends[: num_navs - 1], dtype=int) + 1]
    ends_here = -np.diff(np.concatenate(([1.0], goes_on, [0.0])))
    committed = float(drafts_stand.sum())
    return Prediction(
        Mode.COLLABORATIVE,
        float(ends_here @ told_ms) / committed,
        float(ends_here @ np.array(run.worked_ms[:num_navs])) / committed,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A run in which every draft stands. One entry per NAV; times from the run's start."""

    ends: list[int]  # the number of its last draft
    drafted_ms: list[float]  # when that is ready
    told_ms: list[float]  # when its verdict is at the edge
    worked_ms: list[float]  # what the verifier has worked until then


def _unbroken_run(snapshot: Snapshot, num_navs: int) -> _Run:
    """The first `num_navs` NAVs of a run, at least. Each forward takes all that wait for it."""
    run = _Run([], [], [], [])
    link_free_ms = verifier_free_ms = worked_ms = 0.0
    last_end = -1  # the first forward takes the token before the drafts too
    while len(run.told_ms) < num_navs:
        first = len(run.told_ms)
        start_ms = math.inf
        # what cannot be drafted before a verdict of this very forward has no part in it
        while len(run.ends) < first + snapshot.max_navs_in_flight:
            end, drafted_ms = _next_drafts(snapshot, run)
            sent_ms = max(drafted_ms, link_free_ms) + snapshot.sending_ms
            # only the sum of both ways matters, so the whole of it lies on the way there
            arrived_ms = sent_ms + snapshot.link.rtt_ms
            if len(run.ends) == first:
                start_ms = max(arrived_ms, verifier_free_ms)
            if arrived_ms > start_ms:
                break
            run.ends.append(end)
            run.drafted_ms.append(drafted_ms)
            link_free_ms = sent_ms
        forward_ms = snapshot.forward_ms(run.ends[-1] - last_end)
        last_end = run.ends[-1]
        worked_ms += forward_ms
        verifier_free_ms = start_ms + forward_ms
        run.told_ms.extend([verifier_free_ms] * (len(run.ends) - first))
        run.worked_ms.extend([worked_ms] * (len(run.ends) - first))
    return run


def _next_drafts(snapshot: Snapshot, run: _Run) -> tuple[int, float]:
    """The last draft of the next NAV and when it is ready, as far as verdicts are known."""
    draft_ms, draft_len = snapshot.costs.draft_ms, snapshot.draft_len
    nav = len(run.ends)
    if not nav:
        return draft_len, draft_len * draft_ms
    ready_ms = run.drafted_ms[-1] + draft_len * draft_ms
    if nav >= snapshot.max_navs_in_flight:
        # the full window had one draft of them already, in place of the verdict's next token
        room_ms = run.told_ms[nav - snapshot.max_navs_in_flight]
        ready_ms = max(ready_ms, room_ms + (draft_len - 1) * draft_ms)
    if nav == len(run.told_ms) and run.told_ms[-1] <= ready_ms:
        # the last verdict's next token has judged one of these drafts; another takes its place
        return run.ends[-1] + draft_len + 1, ready_ms + draft_ms
    return run.ends[-1] + draft_len, ready_ms


def _prefix_probs(prefix: tuple[float, ...], num_drafts: int) -> Floats:
    """The probability that the first j drafts stand, [num_drafts + 1] for j = 0, 1, …"""
    known = np.array((1.0, *prefix[:num_drafts]))
    mean_rate = prefix[-1] ** (1.0 / len(prefix))
    beyond = np.arange(1.0, num_drafts + 2 - known.size)
    return np.concatenate((known, known[-1] * mean_rate**beyond))


def check_objective(objective: Objective) -> None:
    """Raises ValueError unless `choose` knows the objective."""
    match objective:
        case "latency" | "cost":
            return
        case float() | int() if 0.0 <= objective <= MAX_MS:
            return
    raise ValueError(
        f"objective must be 'latency', 'cost' or a price in [0, {MAX_MS:g}], got {objective!r}"
    )


def score(prediction: Prediction, objective: Objective) -> float:
    """What the objective makes of a prediction: the lower, the better. ValueError as `choose`."""
    check_objective(objective)
    match objective:
        case "latency":
            return prediction.tpt_ms
        case "cost":
            return prediction.verifier_ms_per_token
        case price:
            return prediction.tpt_ms + price * prediction.verifier_ms_per_token


def _reason(
    mode: Mode, best: Mode, predictions: tuple[Prediction, ...], objective: Objective
) -> str:
    match objective:
        case "latency":
            measure = "ms per token"
        case "cost":
            measure = "verifier ms per token"
        case _:
            measure = f"ms per token at a price of {objective:g} per verifier ms"
    scores = {prediction.mode: score(prediction, objective) for prediction in predictions}
    others = [f"{other} {value:.1f}" for other, value in scores.items() if other is not mode]
    against = f", against {' and '.join(others)}" if others else ", and nothing else is possible"
    stays = "" if mode is best else f", and stays, since {best} is not {LOYALTY:.0%} better"
    return f"{mode.capitalize()} takes {scores[mode]:.1f} {measure}{against}{stays}."
