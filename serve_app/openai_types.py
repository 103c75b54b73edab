"""Requests of the OpenAI API, as far as they are served. Everything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# strict: "0.5" or true is no number, and a float is no count
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no text") from None
    return value


Text = Annotated[str, AfterValidator(_is_text)]
StopStrings = Text | list[Text] | None


class OutriderOptions(BaseModel):
    """`method`: "speculative" drafts at the edge; "off" lets the target decode alone."""

    model_config = _STRICT

    method: Literal["speculative", "off"] = "speculative"


class _Generation(BaseModel):
    model_config = _STRICT

    model: Text | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings = None
    stream: bool | None = None
    outrider: OutriderOptions | None = None

    @property
    def off(self) -> bool:
        """Whether the target is to decode alone."""
        return self.outrider is not None and self.outrider.method == "off"


class Message(BaseModel):
    model_config = _STRICT

    role: Text
    content: Text


class ChatRequest(_Generation):
    messages: list[Message]


class CompletionRequest(_Generation):
    """As at OpenAI, a completion without `max_tokens` has 16."""

    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    prompt: Text
