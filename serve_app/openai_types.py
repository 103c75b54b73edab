"""Requests of the OpenAI API, as far as they are served. Everything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# strict: "0.5" or true is no number, and a float is no count
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no text") from None
    return value


Text = Annotated[str, AfterValidator(_is_text)]
Count = Annotated[int, Field(ge=1)]
Item = TypeVar("Item")
NonEmpty = Annotated[list[Item], Field(min_length=1)]
TokenIds = NonEmpty[int]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Metadata = Annotated[
    dict[
        Annotated[Text, Field(max_length=64)],
        Annotated[Text, Field(max_length=512)],
    ],
    Field(max_length=16),
]


class _Body(BaseModel):
    """A JSON object whose nulls mean defaults, as at OpenAI.

    `idle` are fields that are not supported, with the one value that asks for nothing; any other
    value is refused.
    """

    model_config = _STRICT
    idle: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            key: value
            for key, value in values.items()
            if value is not None and not _same(value, cls.idle.get(key))
        }


def _same(value: Any, idle: Any) -> bool:
    return type(value) is type(idle) and bool(value == idle)  # 1 is not True


class OutriderOptions(_Body):
    """`method`: "speculative" drafts at the edge; "off" lets the target decode alone.

    `tokens`: tell id, text and origin of every token, and the prompt's ids.
    """

    method: Literal["speculative", "off"] = "speculative"
    tokens: bool = False


class StreamOptions(_Body):
    idle = {"include_obfuscation": False}
    include_usage: bool = False


class _Generation(_Body):
    model: Text = ""  # empty: the one model that is served
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Count = 1
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        {}, description="token id → bias"
    )
    ignore_eos: bool = False
    stop: Text | list[Text] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    outrider: OutriderOptions = OutriderOptions()
    # accepted, and without effect here
    user: Text = ""
    safety_identifier: Text = ""
    prompt_cache_key: Text = ""
    metadata: Metadata = {}
    store: bool = False

    @property
    def off(self) -> bool:
        """Whether the target is to decode alone."""
        return self.outrider.method == "off"

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class Message(_Body):
    """One message; the texts of several parts are joined as they are."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    def for_template(self) -> dict[str, str]:
        """What a chat template knows: `developer` is OpenAI's newer word for `system`."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(_Generation):
    idle = {
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "function_call": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    messages: NonEmpty[Message]
    max_completion_tokens: Count | None = Field(None, description="overrides max_tokens")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives come with every token; None: no log-probabilities at all."""
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Generation):
    """As at OpenAI, a completion without `max_tokens` has 16."""

    idle = {"echo": False, "best_of": 1, "suffix": ""}
    max_tokens: Count | None = 16
    prompt: Text | NonEmpty[Text] | TokenIds | NonEmpty[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives come with every token; None: no log-probabilities at all."""
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[i for i in prompt if isinstance(i, int)]]
        return [one for one in prompt if not isinstance(one, int)]
