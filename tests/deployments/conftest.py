"""Fixtures of the deployments' tests."""

from __future__ import annotations

import pytest

from tests.deployments.pair import Pair


@pytest.fixture
def pair() -> Pair:
    return Pair()
