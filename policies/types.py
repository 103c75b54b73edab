"""Values and the four messages that edge and cloud exchange (see ARCHITECTURE.md, "One protocol").

A *position* is an index into prompt + generated ids. Every message names its session and epoch;
every range of ids names its absolute start, so a late or repeated message is always recognisable.
Ids are in no message's repr: errors and logs show those, and must not tell what was written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

Ids = tuple[int, ...]


class SessionError(Exception):
    """An event or message that the protocol does not allow; the session's state is unchanged."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target picks a token. Temperature 0 is greedy; top_k 0 and top_p 1 keep every id.

    Presence and frequency penalty count generated ids, the repetition penalty the prompt's too.
    `logit_bias` is (id, bias) pairs. A stop id ends the text; none is picked among the first
    `min_tokens` generated ids. `logprobs` asks for the log-probability of each token and of that
    many alternatives; None: for none. `prompt_len` is where the generated ids begin; a session sets
    it. Raises ValueError naming the field that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_len: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
        # within these bounds no logit overflows
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= 1e4:
                raise ValueError(f"{name} must be in [-10000, 10000], got {getattr(self, name)}")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ValueError(
                f"repetition_penalty must be in [0.01, 100], got {self.repetition_penalty}"
            )
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not abs(bias) <= 1e4:
                raise ValueError(
                    f"logit_bias must be ids and numbers in [-10000, 10000], got {token_id}: {bias}"
                )
        if any(token_id < 0 for token_id in self.stop_ids):
            raise ValueError(f"stop_ids must be >= 0, got {min(self.stop_ids)}")
        for name in ("min_tokens", "logprobs", "prompt_len"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: the token's, and those of the likeliest ids.

    From the target's own logits, before bias, penalties, temperature and filters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """A model's own token at one position, by the coupled rule (policies/sampling.py).

    `confidence` is the model's softmax probability of it at temperature 1, in [0, 1], and `entropy`
    that of the whole distribution, in nats.
    """

    id: int
    confidence: float
    entropy: float = 0.0
    logprobs: TokenLogprobs | None = None  # if the sampling parameters ask for them


@dataclass(frozen=True, slots=True)
class Open:
    """Edge → cloud: hold this sequence. With a higher epoch it rebuilds a lost session."""

    session: str
    epoch: int
    prompt: Ids = field(repr=False)
    generated: Ids = field(repr=False)
    sampling: SamplingParams = field(repr=False)

    @property
    def ids(self) -> Ids:
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class Batch:
    """Edge → cloud: the draft ids at `start`, a token batch.

    With `nav` the verifier judges every draft up to the batch's end, and then decodes up to
    `decode_on` further tokens by itself. An empty batch with `nav` asks for the next target token.
    """

    session: str
    epoch: int
    start: int
    ids: Ids = field(repr=False)
    nav: bool
    decode_on: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Close:
    """Edge → cloud: forget the session."""

    session: str


class VerdictKind(StrEnum):
    ACCEPTED = "accepted"  # the checked drafts stand; no next token yet (also acknowledges Open)
    BONUS = "bonus"  # the checked drafts stand and `next_id` follows them
    RECOVERED = "recovered"  # a draft fell; `next_id` stands in its place
    VOID = "void"  # a NAV of a closed epoch
    GAP = "gap"  # ids before the NAV are missing; `start` is the expected position
    UNKNOWN_SESSION = "unknown_session"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Cloud → edge: from `start` on, `accepted` drafts stand, and then comes `next_id` if any.

    `logprobs`, if asked for, has one entry per accepted draft and one for `next_id`; None where
    the position was verified before this verifier held the session.
    """

    session: str
    epoch: int
    start: int
    kind: VerdictKind
    accepted: int = 0
    next_id: int | None = field(default=None, repr=False)
    verify_ms: float = 0.0  # what the forward behind it took, on the verifier's clock
    error: str = ""
    logprobs: tuple[TokenLogprobs | None, ...] = field(default=(), repr=False)


class Origin(StrEnum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"  # a draft token that the target would have written
    RECOVERED = "recovered"  # the target's token at the first rejection
    BONUS = "bonus"  # the target's token after a fully accepted batch, or decoded on its own


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
