"""The choices of one request as an OpenAI response: a whole body, or server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from deployments.driver import Models
from policies.metrics import SessionMetrics
from policies.types import Origin
from serve_app.choice import Choice, Piece, Token
from serve_app.errors import ApiError
from serve_app.shapes import Shape
from serve_app.sse import DONE, event

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Telling:
    """How the client wants to be told."""

    shape: Shape
    off: bool
    include_usage: bool  # in a stream; a whole answer always has it
    tokens: bool  # id and origin of every token


class Answer:
    """The choices of one request. `error` and `finished` say how it ended, once it has."""

    def __init__(
        self,
        choices: Sequence[Choice],
        models: Models,
        telling: Telling,
        num_prompt_tokens: int,
    ) -> None:
        self.choices = choices
        self._num_prompt_tokens = num_prompt_tokens
        self._models = models
        self._telling = telling
        self._shape = telling.shape
        self.id = telling.shape.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self.error: ApiError | None = None
        self.finished = False  # every choice came to its end

    @property
    def metrics(self) -> SessionMetrics:
        return SessionMetrics.total(choice.generation.metrics for choice in self.choices)

    @property
    def mode(self) -> str:
        """How the tokens came about: "off" and "speculative" as asked for, or "degraded"."""
        if self._telling.off:
            return "off"
        speculating = all(choice.generation.speculating for choice in self.choices)
        return "speculative" if speculating else "degraded"

    @property
    def usage(self) -> dict[str, Any]:
        """Each prompt once, however many choices it has; tokens as delivered.

        `rejected_prediction_tokens` are the drafts that the target replaced by a delivered token of
        its own; drafts after such a one are never judged, and count as neither.
        """
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._num_prompt_tokens + completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(c.counts[Origin.ACCEPTED] for c in self.choices),
                "rejected_prediction_tokens": sum(c.num_rejected for c in self.choices),
            },
        }

    @property
    def report(self) -> dict[str, Any]:
        """How the tokens came about, in the sums of all choices' sessions."""
        metrics = self.metrics
        return {
            "mode": self.mode,
            "rounds": metrics.rounds,
            "navs": metrics.navs,
            "batches": metrics.batches,
            "drafted": metrics.drafted,
            "accepted": metrics.accepted,
            "recovered": metrics.recovered,
            "bonus": metrics.bonus,
            "resends": metrics.resends,
            "reopens": metrics.reopens,
            "rollbacks": metrics.rollbacks,
            "acceptance_rate": metrics.acceptance_rate,
            "acceptance_len": metrics.acceptance_len,
            "accepted_at": metrics.accepted_at,
            "judged_at": metrics.judged_at,
            "uplink_bytes": metrics.uplink_bytes,
            "downlink_bytes": metrics.downlink_bytes,
            "verify_ms": metrics.verify_ms,
            "tpt_ms": metrics.tpt_ms,
            "ttft_ms": metrics.ttft_ms,
        }

    async def whole(self) -> dict[str, Any]:
        """The response body. Raises ApiError if a generation failed."""
        pieces: dict[int, list[Piece]] = {choice.index: [] for choice in self.choices}
        try:
            async with aclosing(self._merged()) as merged:
                async for choice, piece in merged:
                    pieces[choice.index].append(piece)
            choices = [self._whole_choice(choice, pieces[choice.index]) for choice in self.choices]
            body = self._frame(self._shape.whole, choices)
            return body | {"usage": self.usage, "outrider": self.report}
        except ApiError as error:
            self._failure(error)
            raise
        except Exception as error:
            raise self._failure(error) from error

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events; an error ends them without [DONE]."""
        try:
            if self._shape.chat:
                for choice in self.choices:
                    yield self._chunk(choice, Piece(""), first=True)
            async with aclosing(self._merged()) as merged:
                async for choice, piece in merged:
                    if piece.text or piece.tokens or piece.finish_reason is not None:
                        yield self._chunk(choice, piece)
            if self._telling.include_usage:
                yield event(self._frame(self._shape.chunk, []) | {"usage": self.usage})
            yield DONE
        except Exception as error:
            yield event(self._failure(error).body())

    def _failure(self, error: Exception) -> ApiError:
        """Remember what ended the answer. Of a defect the client learns no more than that."""
        if not isinstance(error, ApiError):
            logger.error("answer %s failed", self.id, exc_info=error)
            error = ApiError(500, "internal error")
        self.error = error
        return error

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """The pieces of all choices as they come. Its reader's pace holds back every generation."""
        ready: asyncio.Queue[tuple[Choice, Piece | Exception]] = asyncio.Queue(maxsize=1)

        async def pump(choice: Choice) -> None:
            try:
                async with aclosing(choice.pieces()) as pieces:
                    async for piece in pieces:
                        await ready.put((choice, piece))
            except Exception as error:
                await ready.put((choice, error))

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        running = len(pumps)
        try:
            while running:
                choice, piece = await ready.get()
                if isinstance(piece, Exception):
                    raise piece
                running -= piece.finish_reason is not None
                self.finished = not running
                yield choice, piece
        finally:
            for task in pumps:
                task.cancel()

    # ---- wording

    def _whole_choice(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        body = self._shape.message("".join(piece.text for piece in pieces))
        return self._choice(choice, body, tokens, pieces[-1].finish_reason)

    def _chunk(self, choice: Choice, piece: Piece, *, first: bool = False) -> str:
        delta = self._shape.delta(piece.text, first=first)
        worded = self._choice(choice, delta, piece.tokens, piece.finish_reason)
        chunk = self._frame(self._shape.chunk, [worded])
        if self._telling.include_usage:
            chunk["usage"] = None
        if self.finished:
            chunk["outrider"] = self.report
        return event(chunk)

    def _choice(
        self,
        choice: Choice,
        body: dict[str, Any],
        tokens: Sequence[Token],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        worded = {"index": choice.index, **body, "finish_reason": finish_reason}
        worded["logprobs"] = self._shape.logprobs(tokens, self._models)
        if self._telling.tokens:
            details: dict[str, Any] = {"tokens": [_detailed(token) for token in tokens]}
            if finish_reason is not None:
                details["prompt_ids"] = list(choice.prompt)
            worded["outrider"] = details
        return worded

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._models.target.name,
            "choices": choices,
        }


def _detailed(token: Token) -> dict[str, Any]:
    details: dict[str, Any] = {"id": token.id, "text": token.text, "origin": token.origin}
    if token.logprobs is not None:
        details["logprob"] = token.logprobs.logprob
        details["top"] = [{"id": i, "logprob": logprob} for i, logprob in token.logprobs.top]
    return details
