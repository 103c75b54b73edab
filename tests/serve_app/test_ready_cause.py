"""What /ready repeats of Serve's messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app import weights
from serve_app.app import cause_of

TRACEBACK = """The deployment failed to start 3 times in a row.
ray::ServeReplica:outrider:CloudVerifier.initialize() (pid=7, ip=192.0.2.1)
  File "/somewhere/replica.py", line 9, in __init__
    raise error
"""


def test_the_cause_of_missing_weights_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    with pytest.raises(weights.WeightsError) as missing:
        weights.resolve("smollm2-135m-instruct")
    told = cause_of(f"{TRACEBACK}serve_app.weights.WeightsError: {missing.value}\n")
    assert told.startswith("serve_app.weights.WeightsError: ")
    assert "outrider weights pull" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("", ""),
        ("Waiting for a node\n\n", "Waiting for a node"),
        (TRACEBACK + "ValueError: no\n", "ValueError: no"),
        ("A.Error: first\n  at x\nB.Error: second\nmore\n", "B.Error: second more"),
    ],
)
def test_of_a_traceback_only_the_exception_is_told(message: str, told: str) -> None:
    assert cause_of(message) == told
