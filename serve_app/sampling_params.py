"""From a request's fields to the parameters that both models pick tokens by."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.engines.protocol import ModelInfo
from policies.types import SamplingParams
from serve_app.config import HttpArgs
from serve_app.errors import ApiError
from serve_app.openai_types import ChatRequest, CompletionRequest

_STEP = 0x9E3779B97F4A7C15  # odd, so that no two choices of a request share a seed


def seed_of_choice(seed: int, index: int) -> int:
    """The seed of a prompt's choice number `index`; the first one has the request's own."""
    return (seed + index * _STEP) % 2**64


def sampling_params(
    body: ChatRequest | CompletionRequest, seed: int, target: ModelInfo
) -> SamplingParams:
    """What the request asks for, at one choice's seed."""
    return SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(sorted((int(key), bias) for key, bias in body.logit_bias.items())),
        min_tokens=body.min_tokens,
        stop_ids=frozenset() if body.ignore_eos else target.end_ids,
        logprobs=body.num_logprobs,
    )


def check_request(body: ChatRequest | CompletionRequest, http: HttpArgs, target: ModelInfo) -> None:
    """Raises ApiError 400 naming the field that no schema could refuse."""
    stop = body.stop_strings
    if len(stop) > http.max_stop_strings:
        raise ApiError(400, f"stop: at most {http.max_stop_strings} strings", param="stop")
    if any(not 1 <= len(text) <= http.max_stop_chars for text in stop):
        raise ApiError(
            400,
            f"stop: every string must have 1 to {http.max_stop_chars} characters",
            param="stop",
        )
    if len(body.logit_bias) > http.max_logit_biases:
        raise ApiError(400, f"logit_bias: at most {http.max_logit_biases} ids", param="logit_bias")
    for key in body.logit_bias:
        # "07" would be id 7 a second time
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and key == str(int(key))):
            raise ApiError(400, f"logit_bias: {key!r} is not a token id", param=f"logit_bias.{key}")
        check_ids([int(key)], target, f"logit_bias.{key}")
    if body.token_limit is not None and body.min_tokens > body.token_limit:
        raise ApiError(
            400,
            f"min_tokens: {body.min_tokens} exceeds the {body.token_limit} tokens allowed",
            param="min_tokens",
        )
    if "stream_options" in body.model_fields_set and not body.stream:
        raise ApiError(400, "stream_options: only with stream", param="stream_options")
    if isinstance(body, ChatRequest) and body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", param="top_logprobs")


def check_ids(ids: Sequence[int], target: ModelInfo, param: str) -> None:
    """Raises ApiError 400 naming the first id that is none of the target's tokens."""
    vocabulary = target.vocabulary
    for token_id in ids:
        if not (0 <= token_id < len(vocabulary) and vocabulary[token_id] is not None):
            raise ApiError(
                400, f"{param}: {token_id} is not a token id of {target.name}", param=param
            )
