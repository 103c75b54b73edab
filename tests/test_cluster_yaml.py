"""cluster.yaml, by Ray's own validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

CLUSTER = Path(__file__).parents[1] / "cluster.yaml"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray may write beside the user's keys
    loaded: dict[str, Any] = yaml.safe_load(CLUSTER.read_text())
    return loaded


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))


def test_both_tiers_are_labelled_and_authenticated(cluster: dict[str, Any]) -> None:
    head = cluster["head_start_ray_commands"][-1]
    worker = cluster["worker_start_ray_commands"][-1]
    assert "--labels=outrider.io/tier=cloud" in head
    assert "--labels=outrider.io/tier=edge" in worker
    assert "RAY_AUTH_MODE=token" in head
    assert "RAY_AUTH_MODE=token" in worker
    # Ray 2.60: with autoscaler v2 the on-premise provider starts one worker too few
    assert "RAY_enable_autoscaler_v2=0" in head
