"""Into which token batches a run of draft tokens is cut, so that the last arrives earliest.

PipeSD's model of edge and uplink (§3.2-3.4): drafting makes a token every `draft_ms`, a batch
leaves when its last token is drafted and the link is free. A schedule is a tuple of batch sizes.
It shapes messages only: how many tokens are drafted is the trigger's affair, not this module's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from policies.costs import LinkCosts, Wire

START_TOKENS = 20  # PipeSD's first N̂
RECENT_NAVS = 32  # whose mean draft length N̂ follows
CACHED_PLANS = 128


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """What makes a schedule good or bad, in milliseconds: PipeSD's γ, α and β, and a delay.

    A batch occupies the link for startup_ms + token_ms · size; it arrives `delay_ms` after that,
    while the next one may already be on its way.
    """

    draft_ms: float  # γ, per token
    startup_ms: float  # α, per batch
    token_ms: float  # β, per token
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("draft_ms", "startup_ms", "token_ms", "delay_ms"):
            _check_cost(name, getattr(self, name))

    @classmethod
    def of(cls, draft_ms: float, link: LinkCosts, wire: Wire) -> BatchCosts:
        """By what the wire carries, and whether its delay occupies it.

        An overhead that was measured holds all that occupies the link, the delay too if it does.
        """
        delay_is_missing = wire.one_request_at_a_time and link.overhead_ms == 0.0
        model = cls.occupying if delay_is_missing else cls.persistent
        return model(draft_ms, link, wire.draft_bytes, wire.message_bytes)

    @classmethod
    def occupying(
        cls, draft_ms: float, link: LinkCosts, bytes_per_token: float, bytes_per_message: float
    ) -> BatchCosts:
        """One request after the other, PipeSD's own model: its α includes the way to the cloud.

        Half the round trip stands for the one-way delay, which no clock at one end can tell; that
        the next request waits for the answer too is not in the paper's model.
        """
        wire = cls.persistent(draft_ms, link, bytes_per_token, bytes_per_message)
        return cls(draft_ms, wire.startup_ms + wire.delay_ms, wire.token_ms)

    @classmethod
    def persistent(
        cls, draft_ms: float, link: LinkCosts, bytes_per_token: float, bytes_per_message: float
    ) -> BatchCosts:
        """A connection that stays open: overhead and bytes occupy it, half the round trip does not.

        `bytes_per_message` is what a message has besides its tokens.
        """
        _check_cost("bytes_per_token", bytes_per_token)
        _check_cost("bytes_per_message", bytes_per_message)
        return cls(
            draft_ms,
            startup_ms=link.overhead_ms + bytes_per_message * link.ms_per_byte,
            token_ms=bytes_per_token * link.ms_per_byte,
            delay_ms=link.rtt_ms / 2,
        )


def makespan(sizes: Sequence[int], costs: BatchCosts) -> float:
    """Milliseconds from the first draft's start to the last batch's arrival, T(B) of §3.3."""
    _check_sizes(sizes)
    free_ms = 0.0  # when the link is
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        starts_ms = max(free_ms, costs.draft_ms * end)
        free_ms = starts_ms + costs.startup_ms + costs.token_ms * size
    return free_ms + costs.delay_ms


@lru_cache(maxsize=CACHED_PLANS)
def plan(num_tokens: int, costs: BatchCosts) -> tuple[int, ...]:
    """A schedule of the least makespan: PipeSD's Algorithm 1, O(num_tokens²).

    Of plans that take equally long it is that with the fewest messages, and of those the one with
    the largest last batch, with one reservation: each batch ends as early as any schedule of the
    tokens so far could end it. A trigger may cut the period short, and then only what was
    early at the cut counts.

    Plans are cached by their exact costs, CACHED_PLANS of them. Costs that jitter miss the cache
    without growing it; who wants it to hit re-plans when the environment reports a change.
    """
    _check_tokens(num_tokens)
    # for the first `end` tokens: when the link is free again, in how many messages, last from where
    best = [(0.0, 0, 0)]
    for end in range(1, num_tokens + 1):
        drafted_ms = costs.draft_ms * end
        best.append(
            min(
                (
                    max(free_ms, drafted_ms) + costs.startup_ms + costs.token_ms * (end - start),
                    messages + 1,
                    start,
                )
                for start, (free_ms, messages, _) in enumerate(best)
            )
        )
    sizes: list[int] = []
    end = num_tokens
    while end:
        start = best[end][2]
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))


def immediate(num_tokens: int) -> tuple[int, ...]:
    """Every token as soon as it is drafted."""
    _check_tokens(num_tokens)
    return (1,) * num_tokens


def single_upload(num_tokens: int) -> tuple[int, ...]:
    """All tokens in one message, when the last is drafted."""
    _check_tokens(num_tokens)
    return (num_tokens,)


def lower_bound(num_tokens: int, costs: BatchCosts) -> float:
    """Milliseconds that no schedule beats: N·γ + α + β + delay.

    The last token is drafted after N·γ and then has to be sent, alone at best.
    """
    _check_tokens(num_tokens)
    sent_ms = costs.startup_ms + costs.token_ms
    return costs.draft_ms * num_tokens + sent_ms + costs.delay_ms


def drafts_until_batch(sizes: Sequence[int], num_drafts: int) -> int:
    """How many drafts after `num_drafts`, counted from the period's start, the next batch leaves.

    At least 1. Periods follow each other (rule 2 of PipeSD's §4, while a verdict is awaited); a
    trigger sends what there is and starts a new one (rule 1): `num_drafts` is then 0 again.
    """
    _check_sizes(sizes)
    if num_drafts < 0:
        raise ValueError(f"num_drafts must be >= 0, got {num_drafts}")
    in_period = num_drafts % sum(sizes)
    return next(end for end in accumulate(sizes) if end > in_period) - in_period


class Window:
    """N̂, the number of drafts that are planned at a time: the rolling mean draft length per NAV.

    The mean is that of the last RECENT_NAVS, of fewer while there are fewer, and START_TOKENS
    before the first.
    """

    def __init__(self, max_window: int) -> None:
        if max_window < 1:
            raise ValueError(f"max_window must be >= 1, got {max_window}")
        self._max_window = max_window
        self._draft_lens: deque[int] = deque(maxlen=RECENT_NAVS)

    def observe_nav(self, draft_len: int) -> None:
        """A NAV over `draft_len` drafts was requested; 0 counts too."""
        if draft_len < 0:
            raise ValueError(f"draft_len must be >= 0, got {draft_len}")
        self._draft_lens.append(draft_len)

    @property
    def num_tokens(self) -> int:
        """N̂, halves rounded up, in [1, max_window]."""
        navs = len(self._draft_lens)
        mean = (2 * sum(self._draft_lens) + navs) // (2 * navs) if navs else START_TOKENS
        return min(max(mean, 1), self._max_window)


def _check_cost(name: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")


def _check_tokens(num_tokens: int) -> None:
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {num_tokens}")


def _check_sizes(sizes: Sequence[int]) -> None:
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be batch sizes >= 1, at least one, got {tuple(sizes)}")
