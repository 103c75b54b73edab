"""A toy pair of models whose acceptance is scripted: no weights, the same protocol.

The target's logits are a hash of the last ids and the position; the draft has the target's logits
where a second hash is below `agreement`, and a different favourite elsewhere. Both are functions of
the prefix alone, so every run is reproducible and every answer has an oracle: `ToyModel.write`.
Ids below 256 are bytes, of which a model writes letters and spaces; id 256 ends a text.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deployments.engines.protocol import (
    ChatTemplateError,
    EngineError,
    ModelInfo,
    Tokenizer,
)
from policies.sampling import NonFiniteLogits, pick
from policies.types import Pick, SamplingParams

END_ID = 256
VOCABULARY = (*(bytes([i]) for i in range(256)), b"<end>")
_WRITABLE = tuple(b"abcdefghijklmnopqrstuvwxyz ")
_ORDER = 8  # how many of the last ids the next one depends on


class ByteTokenizer:
    """One id per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not messages:
            raise ChatTemplateError("messages must not be empty")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END_ID else b""


def byte_tokenizer() -> Tokenizer:
    """The factory that the scripted models' ModelInfo carries."""
    return ByteTokenizer()


@dataclass(frozen=True, slots=True)
class ToyModel:
    """`agreement` 1 is the target itself, 0 a draft that never has the target's favourite.

    About one id in `end_every` ends the text; 0 means none does.
    """

    seed: int = 0
    agreement: float = 1.0
    end_every: int = 0

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[len(VOCABULARY)] after `ids`; -inf for what is never written."""
        digest = self._hash(ids, salt=0)
        rng = np.random.Generator(np.random.PCG64(digest))
        scores = rng.normal(scale=3.0, size=len(_WRITABLE)).astype(np.float32)
        if self._hash(ids, salt=1) >= self.agreement * 2**32:
            scores = np.roll(scores, 1)
        row = np.full(len(VOCABULARY), -np.inf, dtype=np.float32)
        row[list(_WRITABLE)] = scores
        if self.end_every and digest % self.end_every == 0:
            row[END_ID] = scores.max() + 5.0
        return row

    def write(
        self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams
    ) -> tuple[int, ...]:
        """What this model alone writes after the prompt, up to and with the end id."""
        ids = list(prompt)
        sampling = replace(sampling, prompt_len=len(ids))
        while len(ids) < len(prompt) + max_tokens:
            ids.append(pick(self.logits(ids), sampling, ids, len(ids)).id)
            if ids[-1] == END_ID:
                break
        return tuple(ids[len(prompt) :])

    def _hash(self, ids: Sequence[int], salt: int) -> int:
        tail = np.asarray(ids[-_ORDER:], dtype=np.int32).tobytes()
        return zlib.crc32(tail, zlib.crc32(f"{self.seed} {salt} {len(ids)}".encode()))


class ScriptedEngine:
    """Satisfies Engine with a toy model; `forward_ms` is the time one call takes."""

    def __init__(
        self,
        model: ToyModel,
        *,
        name: str = "scripted",
        context: int = 4096,
        max_sessions: int = 64,
        forward_ms: float = 0.0,
    ) -> None:
        self.info = ModelInfo(
            name=name,
            context=context,
            max_sessions=max_sessions,
            vocabulary=VOCABULARY,
            end_ids=frozenset({END_ID}),
            tokenizer=byte_tokenizer,
        )
        self._model = model
        self._forward_s = forward_ms / 1000.0
        self._device = asyncio.Lock()  # one forward at a time, as on a real device
        self._held: dict[str, tuple[list[int], SamplingParams]] = {}
        self._stopped = False

    @property
    def num_sessions(self) -> int:
        return len(self._held)

    async def open(self, session: str, ids: Sequence[int], sampling: SamplingParams) -> None:
        if session not in self._held and len(self._held) >= self.info.max_sessions:
            raise EngineError(f"no free slot among {self.info.max_sessions}")
        if not 1 <= len(ids) <= self.info.context:
            raise EngineError(f"cannot hold {len(ids)} ids in a context of {self.info.context}")
        self._held[session] = (list(ids[:-1]), sampling)

    async def feed(self, session: str, position: int, ids: Sequence[int]) -> list[Pick]:
        self.check()
        if session not in self._held:
            raise EngineError(f"session {session} is not held")
        held, sampling = self._held[session]
        if position > len(held) or position + len(ids) > self.info.context:
            raise EngineError(
                f"cannot put {len(ids)} ids at {position} after {len(held)} in a context of "
                f"{self.info.context}"
            )
        if self._forward_s:
            async with self._device:
                await asyncio.sleep(self._forward_s)
        del held[position:]
        choices = []
        for token_id in ids:
            held.append(token_id)
            try:
                choices.append(pick(self._model.logits(held), sampling, held, len(held)))
            except NonFiniteLogits as error:
                del held[position:]
                raise EngineError(str(error)) from error
        return choices

    async def close(self, session: str) -> None:
        self._held.pop(session, None)

    def check(self) -> None:
        if self._stopped:
            raise EngineError(f"engine {self.info.name} is shut down")

    def shutdown(self) -> None:
        self._stopped = True
        self._held.clear()
