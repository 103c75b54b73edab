"""The notebooks run from top to bottom, and lie in git without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_make_notebooks_runs_it(path: Path, tmp_path: Path) -> None:
    """By the same command; every picture and table it shows is there afterwards."""
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    jupyter = Path(sys.executable).with_name("jupyter")
    done = subprocess.run(
        [jupyter, "execute", "--inplace", copy], capture_output=True, text=True, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [
        kind for cell in code_cells(copy) for out in cell["outputs"] for kind in out.get("data", {})
    ]
    assert "image/png" in shown
    assert "text/html" in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def test_there_are_the_four_notebooks() -> None:
    assert [path.stem[:3] for path in NOTEBOOKS] == ["01_", "02_", "03_", "04_"]
