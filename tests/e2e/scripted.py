"""The toy graph of the end-to-end tests, and what its target writes alone."""

from __future__ import annotations

from deployments.engines.scripted import ToyModel
from policies.types import SamplingParams

SCRIPTED = {"draft.engine": "scripted", "verifier.engine": "scripted", "scripted.seed": 4}


def alone(prompt: str, count: int, sampling: SamplingParams | None = None) -> str:
    """The text that the target of the toy graph writes after a prompt."""
    ids = ToyModel(4).write(prompt.encode(), count, sampling or SamplingParams())
    return bytes(ids).decode()
