"""What a model must offer to draft or to verify, in token ids; text belongs to the tokenizer.

One protocol serves both roles: drafting feeds the last id and reads one choice, verifying feeds a
token batch and reads a choice after every id of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.types import Pick, SamplingParams

Vocabulary = tuple[bytes | None, ...]


class EngineError(Exception):
    """One session's forward failed (non-finite logits, no room); other sessions go on."""


class ChatTemplateError(ValueError):
    """The model's chat template refuses these messages; `index` is the first one it refuses."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason)
        self.index = index


class Tokenizer(Protocol):
    """The target's tokenizer, the only one that turns text into ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Text that spells a control token is not turned into that token."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat prompt that ends where the assistant's answer begins.

        Raises ChatTemplateError. Control tokens come from the template only, never from content.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for control tokens."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the other side must know of a loaded model.

    `vocabulary[i]` is the token string of id i, or None for a padding row, which is never emitted.
    `context` is the number of ids one session may hold. `tokenizer` builds the tokenizer where it
    is needed, and is picklable.
    """

    name: str
    context: int
    max_sessions: int
    vocabulary: Vocabulary
    end_ids: frozenset[int]
    tokenizer: Callable[[], Tokenizer]


class Engine(Protocol):
    """A model holding several sequences at once. Calls never block the event loop.

    Calls of different sessions may overlap; those of one session are made one after the other.
    """

    info: ModelInfo

    async def open(self, session: str, ids: Sequence[int], sampling: SamplingParams) -> None:
        """Hold a sequence and prefill all of `ids` but the last. Raises EngineError if full."""

    async def feed(self, session: str, position: int, ids: Sequence[int]) -> list[Pick]:
        """Put `ids` at `position`, dropping what was held from there on; the choice after each id.

        `position` is at most the number of ids held. Raises EngineError; the session then still
        holds what it held before `position`.
        """

    async def close(self, session: str) -> None:
        """Forget the sequence; unknown sessions are ignored."""

    def check(self) -> None:
        """Raises EngineError if the engine can serve no more."""

    def shutdown(self) -> None:
        """Free the model. Calls still running end with EngineError."""
