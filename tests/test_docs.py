"""The documents say what the code does."""

from __future__ import annotations

from pathlib import Path

from serve_app.reference import configuration
from serve_app.telemetry import METRICS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_configuration_reference_is_the_models_own() -> None:
    assert (DOCS / "configuration.md").read_text() == configuration()


def test_every_metric_is_documented_with_its_kind_and_meaning() -> None:
    text = (DOCS / "operations.md").read_text()
    for metric in METRICS:
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{metric.name}`")]
        assert row.endswith(f"| {metric.kind} | {metric.meaning} |")
