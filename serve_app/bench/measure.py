"""Timed requests to an endpoint: every prompt with speculation and by the target alone.

Times are the client's own, by the clock that is given. A chunk may bring several tokens, so tokens
are counted by id, never by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from serve_app.bench.comparison import Comparison, compare
from serve_app.client import Chunk, Endpoint, EndpointError, Report, Settings

Clock = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class Run:
    """One timed request, from its start."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    ttft_ms: float  # to the first chunk that brought a token
    lasted_ms: float  # to the last one
    itl_ms: tuple[float, ...]  # between successive chunks that brought tokens
    report: Report

    @property
    def tpt_ms(self) -> float:
        """Total generation time / tokens, prefill included."""
        return self.lasted_ms / len(self.ids)

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first; None for a single token."""
        decoded = len(self.ids) - 1
        return (self.lasted_ms - self.ttft_ms) / decoded if decoded else None


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, answered both ways."""

    off: Run
    speculative: Run
    comparison: Comparison


def measure(
    endpoint: Endpoint, chat: bool, prompts: Sequence[str], max_tokens: int, clock: Clock
) -> Iterator[Pair | EndpointError]:
    """Every prompt by both methods, which take turns to go first; a prompt that fails is an error.

    One request of each method comes before the timed ones.
    """

    def run(prompt: str, method: str) -> Run:
        settings = Settings(method, max_tokens=max_tokens, temperature=0.0)
        if chat:
            return timed(endpoint.chat([{"role": "user", "content": prompt}], settings), clock)
        return timed(endpoint.complete(prompt, settings), clock)

    order = ("off", "speculative")
    for method in order:
        with suppress(EndpointError):  # what fails here fails again where it is counted
            run(prompts[0], method)
    for prompt in prompts:
        try:
            runs = {method: run(prompt, method) for method in order}
            off, speculative = runs["off"], runs["speculative"]
            judged = compare(endpoint, speculative.prompt_ids, speculative.ids, off.ids)
            outcome: Pair | EndpointError = Pair(off, speculative, judged)
        except EndpointError as error:
            outcome = error
        yield outcome
        order = order[::-1]


def timed(chunks: Iterator[Chunk], clock: Clock) -> Run:
    """Read a stream to its end; its request is made with the first read. Raises EndpointError."""
    start = clock()
    arrivals_ms: list[float] = []
    ids: list[int] = []
    prompt_ids: tuple[int, ...] = ()
    report = None
    for chunk in chunks:
        if chunk.tokens:
            arrivals_ms.append((clock() - start) * 1000.0)
            ids += [token.id for token in chunk.tokens]
        prompt_ids, report = chunk.prompt_ids, chunk.report  # the last chunk has them
    if not ids or not prompt_ids or report is None:
        raise EndpointError("an answer came without its tokens or those of its prompt")
    gaps_ms = tuple(later - earlier for earlier, later in pairwise(arrivals_ms))
    return Run(prompt_ids, tuple(ids), arrivals_ms[0], arrivals_ms[-1], gaps_ms, report)
