"""One choice of an answer: a generation, its text, and what each delivered token was."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from deployments.driver import Generation
from policies.events import Emit, Finish
from policies.types import FinishReason, Ids, Origin, TokenLogprobs
from serve_app.errors import ApiError
from serve_app.text import TextStream


@dataclass(frozen=True, slots=True)
class Token:
    """One delivered token. `text` is what it made certain, `offset` where its own text begins."""

    id: int
    text: str
    origin: Origin
    logprobs: TokenLogprobs | None
    offset: int  # characters of the choice's text before it


@dataclass(frozen=True, slots=True)
class Piece:
    """What one verdict, or the end, added to a choice. The last one has a finish reason."""

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None


class Choice:
    """Turns a generation into pieces; text, tokens and counts are all cut at the same token."""

    def __init__(self, index: int, prompt: Ids, generation: Generation, text: TextStream) -> None:
        self.index = index
        self.prompt = prompt
        self.generation = generation
        self._text = text
        self.counts = dict.fromkeys(Origin, 0)  # of the delivered tokens
        self.num_rejected = 0  # drafts that a delivered token replaced
        self._unstopped = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.values())

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The choice as it becomes certain. Raises ApiError if the generation failed."""
        async with aclosing(self.generation.stream()) as stream:
            async for item in stream:
                if isinstance(item, Finish):
                    if item.reason is FinishReason.ERROR:
                        raise ApiError(500, f"generation failed: {item.error}")
                    yield Piece(self._text.finish(), finish_reason=item.reason.value)
                    return
                tokens = tuple(self._deliver(item))
                text = "".join(token.text for token in tokens)
                yield Piece(text, tokens, "stop" if self._text.stopped else None)
                if self._text.stopped:
                    return

    def _deliver(self, emitted: Emit) -> list[Token]:
        """The emitted tokens up to and with the one that completes a stop string."""
        tokens: list[Token] = []
        for i, (token_id, origin) in enumerate(zip(emitted.ids, emitted.origins, strict=True)):
            logprobs = emitted.logprobs[i] if emitted.logprobs else None
            self.counts[origin] += 1
            self.num_rejected += emitted.refuted and i == len(emitted.ids) - 1
            text = self._text.push(token_id)
            tokens.append(Token(token_id, text, origin, logprobs, self._offset))
            if logprobs is not None:
                token_bytes = self._text.tokenizer.token_bytes(token_id)
                self._offset += len(self._unstopped.decode(token_bytes))
            if self._text.stopped:
                break
        return tokens
