"""What a user can set, by `key=value` on the command line or `args` in a YAML file.

Keys are nested and may be written with dots (`draft.model=…`). An unknown key or a bad value is an
error that names it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from policies.methods import METHODS, Batches, Method, TriggerKind
from policies.session import SessionConfig

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


_OF_THE_METHOD = "; none: the method's own"


class PolicyArgs(_Args):
    """How to draft, verify and learn: a named method, and what of it is to be otherwise."""

    method: str = Field("vanilla", description="a row of the table of methods at the end")
    trigger: TriggerKind | None = Field(
        None, description="what asks for a verification before `draft_len` does" + _OF_THE_METHOD
    )
    draft_len: int | None = Field(
        None, ge=1, le=64, description="drafts per NAV, at most" + _OF_THE_METHOD
    )
    token_threshold: float | None = Field(
        None, ge=0.0, le=1.0, description="confidence of one draft (token, dual)"
    )
    sequence_threshold: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="product of confidences since the last NAV (sequence, dual)",
    )
    rejection_threshold: float | None = Field(
        None, ge=0.0, le=1.0, description="probability that some draft falls (entropy)"
    )
    nav_price_ms: float | None = Field(
        None,
        ge=0.0,
        allow_inf_nan=False,
        description="what a forward of the target is worth in the edge's time (price)",
    )
    max_window: int | None = Field(
        None, ge=1, le=256, description="drafts that may wait for a verdict" + _OF_THE_METHOD
    )
    max_navs_in_flight: int | None = Field(
        None, ge=1, le=256, description="verifications under way at once" + _OF_THE_METHOD
    )
    draft_while_waiting: bool | None = Field(
        None, description="draft on while a verification is under way" + _OF_THE_METHOD
    )
    batches: Batches | None = Field(
        None,
        description="drafts leave with their NAV, each at once, or by PipeSD's schedule"
        + _OF_THE_METHOD,
    )
    objective: Literal["latency", "cost"] | float | None = Field(
        None,
        description="go over to decoding by the target alone, and back, by what is faster "
        "(`latency`), what takes less of the verifier (`cost`), or the time per token + this "
        "price x the verifier's" + _OF_THE_METHOD,
    )
    state_dir: str | None = Field(
        None,
        description="directory on the edge node that keeps what was learned, a file for each pair "
        "and one for each method on it; none: it is forgotten with the driver",
    )
    resend_after_ms: float = Field(
        5_000.0, gt=0, description="silence of the verifier before what is unanswered is repeated"
    )
    give_up_after_ms: float = Field(
        300_000.0, gt=0, description="time without progress before an answer fails"
    )
    drafter_timeout_ms: float = Field(
        10_000.0, gt=0, description="silence of the drafter before the target goes on alone"
    )

    @field_validator("method")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"must be one of {', '.join(METHODS)}, got {value}")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        try:
            self.chosen()
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None
        return self

    def chosen(self) -> Method:
        """The method with what was set otherwise."""
        names = [field.name for field in fields(Method)]
        otherwise = {name: getattr(self, name, None) for name in names}
        changes = {name: value for name, value in otherwise.items() if value is not None}
        return replace(METHODS[self.method], **changes)

    def session_config(self) -> SessionConfig:
        return replace(
            self.chosen().session_config(),
            resend_after_ms=self.resend_after_ms,
            give_up_after_ms=self.give_up_after_ms,
            drafter_timeout_ms=self.drafter_timeout_ms,
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
