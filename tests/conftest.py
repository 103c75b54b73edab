"""Weights for the tests: required, never skipped. `make test` pulls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app import weights


@pytest.fixture(scope="session")
def draft_path() -> Path:
    return weights.require("qwen2.5-coder-0.5b-instruct")


@pytest.fixture(scope="session")
def target_path() -> Path:
    return weights.require("qwen2.5-coder-1.5b-instruct")


@pytest.fixture(scope="session")
def small_path() -> Path:
    return weights.require("smollm2-135m-instruct")
