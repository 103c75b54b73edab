"""What differs between the two endpoints: names, where the text goes, and how logprobs look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.driver import Models
from policies.types import TokenLogprobs
from serve_app.choice import Token


@dataclass(frozen=True, slots=True)
class Shape:
    """One of the OpenAI API's two kinds of answer."""

    id_prefix: str
    whole: str
    chunk: str
    chat: bool

    def message(self, text: str) -> dict[str, Any]:
        """The text of a whole choice."""
        if self.chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    def delta(self, text: str, *, first: bool = False) -> dict[str, Any]:
        """The text that a chunk adds; `first` is the chunk that names the role."""
        if not self.chat:
            return {"text": text}
        if first:
            return {"delta": {"role": "assistant", "content": text}}
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, tokens: Sequence[Token], models: Models) -> dict[str, Any] | None:
        """The log-probabilities of tokens, or None if none were asked for."""
        entries = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
        if not entries:
            return None
        if self.chat:
            content = [_chat_entry(token, logprobs, models) for token, logprobs in entries]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token_text(token.id, models) for token, _ in entries],
            "token_logprobs": [logprobs.logprob for _, logprobs in entries],
            "top_logprobs": [_by_text(token, logprobs, models) for token, logprobs in entries],
            "text_offset": [token.offset for token, _ in entries],
        }


CHAT = Shape("chatcmpl-", "chat.completion", "chat.completion.chunk", chat=True)
COMPLETION = Shape("cmpl-", "text_completion", "text_completion", chat=False)


def token_text(token_id: int, models: Models) -> str:
    """A token as text; a control token, which adds none, as the model's file spells it."""
    return _bytes(token_id, models).decode(errors="replace")


def _bytes(token_id: int, models: Models) -> bytes:
    return models.tokenizer.token_bytes(token_id) or models.target.vocabulary[token_id] or b""


def _chat_entry(token: Token, logprobs: TokenLogprobs, models: Models) -> dict[str, Any]:
    top = [_named(i, logprob, models) for i, logprob in logprobs.top]
    return _named(token.id, logprobs.logprob, models) | {"top_logprobs": top}


def _named(token_id: int, logprob: float, models: Models) -> dict[str, Any]:
    data = _bytes(token_id, models)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _by_text(token: Token, logprobs: TokenLogprobs, models: Models) -> dict[str, float]:
    """The likeliest tokens and, as at OpenAI, the one that was written."""
    # several ids may spell alike; the likeliest, which comes first, gives the figure
    by_text: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top, (token.id, logprobs.logprob)):
        by_text.setdefault(token_text(token_id, models), logprob)
    return by_text
