"""What a user can set, by `key=value` on the command line or `args` in a YAML file.

Keys are nested and may be written with dots (`draft.model=…`). An unknown key or a bad value is an
error that names it.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from policies.session import SessionConfig
from policies.trigger import (
    DualThresholdTrigger,
    FixedTrigger,
    SequenceTrigger,
    TokenTrigger,
    Trigger,
)

KEY_VARIABLE = "OUTRIDER_API_KEY"  # of the environment: the endpoint's key, for both its sides


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedArgs(_Args):
    """The toy pair of `engine=scripted`, which needs no weights."""

    seed: int = Field(0, ge=0, description="another seed, another text")
    agreement: float = Field(0.8, ge=0.0, le=1.0, description="how often the draft is right")
    end_every: int = Field(0, ge=0, description="one id in so many ends the text; 0: none")
    draft_ms: float = Field(0.0, ge=0.0, description="what a draft token takes")
    verify_ms: float = Field(0.0, ge=0.0, description="what a forward of the target takes")


class ModelArgs(_Args):
    """One model. `model` is a name of `outrider weights list` or the path of a GGUF file."""

    engine: Literal["llama", "scripted"] = Field(
        "llama", description="`scripted`: a toy model without weights"
    )
    model: str
    context: int = Field(4096, ge=16, le=1_048_576, description="tokens that a session may hold")
    max_sessions: int = Field(8, ge=1, le=256, description="sessions that a replica holds at once")
    threads: int | None = Field(None, ge=1, description="CPU threads; none: one per core")
    stall_s: float = Field(
        60.0,
        gt=0,
        description="a llama.cpp forward that takes longer counts as hung, and Serve replaces the "
        "replica; one forward has at most 256 tokens",
    )
    num_cpus: float = Field(0.5, ge=0.0, description="CPUs that Ray reserves for a replica")


_MODEL = "a name of `outrider weights list`, or a GGUF file on the node that runs it"


class DraftArgs(ModelArgs):
    """The draft model, one replica on every edge node."""

    model: str = Field("qwen2.5-coder-0.5b-instruct", description=_MODEL)


class VerifierArgs(ModelArgs):
    """The target model, on the cloud nodes."""

    model: str = Field("qwen2.5-coder-1.5b-instruct", description=_MODEL)
    num_replicas: int = Field(1, ge=1, le=1024, description="replicas, each with its own model")
    num_gpus: float = Field(0.0, ge=0.0, description="GPUs that Ray reserves for a replica")


class PolicyArgs(_Args):
    """When to verify, and how far to draft ahead."""

    trigger: Literal["fixed", "token", "sequence", "dual"] = Field(
        "fixed",
        description="verify after `draft_len` drafts (fixed), or before that at a draft of low "
        "confidence (token: HSL), a low product of confidences (sequence: EdgeLLM), or either "
        "(dual: PipeSD)",
    )
    draft_len: int = Field(4, ge=1, le=64, description="drafts per NAV, at most")
    token_threshold: float = Field(
        0.5, ge=0.0, le=1.0, description="confidence of one draft (token, dual)"
    )
    sequence_threshold: float = Field(
        0.3,
        ge=0.0,
        le=1.0,
        description="product of confidences since the last NAV (sequence, dual)",
    )
    max_window: int = Field(16, ge=1, le=256, description="drafts that may wait for a verdict")
    max_navs_in_flight: int = Field(1, ge=1, le=256, description="verifications under way at once")
    draft_while_waiting: bool = Field(
        False, description="draft on while a verification is under way"
    )
    batch_len: int | None = Field(None, ge=1, description="drafts sent ahead of their NAV")
    resend_after_ms: float = Field(
        5_000.0, gt=0, description="silence of the verifier before what is unanswered is repeated"
    )
    give_up_after_ms: float = Field(
        300_000.0, gt=0, description="time without progress before an answer fails"
    )
    drafter_timeout_ms: float = Field(
        10_000.0, gt=0, description="silence of the drafter before the target goes on alone"
    )

    @model_validator(mode="after")
    def _window_holds_a_draft(self) -> Self:
        if self.max_window < self.draft_len:
            raise ValueError(
                f"policy.max_window must be >= policy.draft_len ({self.draft_len}), "
                f"got {self.max_window}"
            )
        return self

    def session_config(self) -> SessionConfig:
        return SessionConfig(
            trigger=self._trigger(),
            max_window=self.max_window,
            max_navs_in_flight=self.max_navs_in_flight,
            draft_while_waiting=self.draft_while_waiting,
            batch_len=self.batch_len,
            resend_after_ms=self.resend_after_ms,
            give_up_after_ms=self.give_up_after_ms,
            drafter_timeout_ms=self.drafter_timeout_ms,
        )

    def _trigger(self) -> Trigger:
        match self.trigger:
            case "fixed":
                return FixedTrigger(self.draft_len)
            case "token":
                return TokenTrigger(self.token_threshold, self.draft_len)
            case "sequence":
                return SequenceTrigger(self.sequence_threshold, self.draft_len)
            case "dual":
                return DualThresholdTrigger(
                    self.sequence_threshold, self.token_threshold, self.draft_len
                )


class HttpArgs(_Args):
    """The HTTP endpoint: who may use it, and how much a request may ask for."""

    api_key_file: str | None = Field(
        None, description="API keys, one a line, read where `serve run` runs"
    )
    allow_anonymous: bool = Field(
        False, description="serve without a key on other addresses than loopback"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web origins that may call, with commas between"
    )
    max_sessions: int = Field(
        64, ge=1, description="choices a driver admits, running or waiting; beyond them 503"
    )
    max_choices: int = Field(16, ge=1, le=1024, description="prompts x n of one request")
    max_body_bytes: int = Field(2**20, ge=1024, description="size of a request")
    max_stop_strings: int = Field(4, ge=0, le=64, description="strings in `stop`")
    max_stop_chars: int = Field(256, ge=1, le=65_536, description="characters of a stop string")
    max_logit_biases: int = Field(300, ge=0, le=100_000, description="ids in `logit_bias`")
    grace_s: float = Field(
        20.0, ge=0.0, description="how long running answers may go on after a shutdown began"
    )

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _separated_by_commas(cls, value: Any) -> Any:
        return tuple(map(str.strip, value.split(","))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _a_request_can_be_admitted(self) -> Self:
        if self.max_choices > self.max_sessions:
            raise ValueError(
                f"http.max_choices must be <= http.max_sessions ({self.max_sessions}), "
                f"got {self.max_choices}"
            )
        return self


class LogArgs(_Args):
    """Serve's log files of our replicas, which hold our lines too."""

    format: Literal["json", "text"] = Field("json", description="of the files; stderr has text")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="and above")


class GraphArgs(_Args):
    """The arguments of `serve run serve_app:graph`."""

    draft: DraftArgs = DraftArgs()
    verifier: VerifierArgs = VerifierArgs()
    policy: PolicyArgs = PolicyArgs()
    http: HttpArgs = HttpArgs()
    log: LogArgs = LogArgs()
    scripted: ScriptedArgs = ScriptedArgs()

    @model_validator(mode="before")
    @classmethod
    def _nest_dotted_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        nested: dict[str, Any] = {}
        for key, value in values.items():
            *groups, leaf = str(key).split(".")
            into = nested
            for group in groups:
                into = into.setdefault(group, {})
                if not isinstance(into, dict):
                    raise ValueError(f"{group} is a value, so {key} cannot be set")
            if leaf in into and isinstance(into[leaf], dict) and isinstance(value, dict):
                into[leaf] |= value
            elif leaf in into:
                raise ValueError(f"{key} is given twice")
            else:
                into[leaf] = dict(value) if isinstance(value, dict) else value
        return nested
