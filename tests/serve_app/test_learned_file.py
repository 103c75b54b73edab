"""What is learned outlives the driver, and a file that is no use does not stop it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from policies.controller import Learned
from policies.methods import METHODS
from serve_app.learned_file import restore, save
from tests.serve_app.server import TEXT, serving
from tests.serve_app.test_telemetry import turns_until

BODY = {"prompt": "once", "max_tokens": 60, "temperature": 0}


async def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    config = {"policy.method": "ucb", "policy.state_dir": str(tmp_path / "new" / "directory")}
    async with serving(**config) as server, server.app.router.lifespan_context(server.app):
        await turns_until(lambda: server.api.learned_path is not None)
        for _ in range(4):
            await server.client.post(TEXT, json=BODY)
        assert server.api.learned is not None
        before = server.api.learned.state()
    [file] = (tmp_path / "new" / "directory").iterdir()
    assert file.name.startswith("toy-target--toy-target--ucb--")
    async with serving(**config) as server, server.app.router.lifespan_context(server.app):
        await turns_until(lambda: server.api.learned_path is not None)
        assert server.api.learned is not None
        assert server.api.learned.state() == before
    assert before["calibration"]["observations"] > 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "other"}', "NaN"])
def test_a_file_that_is_no_use_is_told_and_replaced(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "state.json"
    path.write_text(content)
    learned = Learned(METHODS["ucb"])
    restore(path, learned)
    assert str(path) in caplog.text
    save(path, learned.state())
    assert json.loads(path.read_text()) == learned.state()
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_there_is_nothing_to_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    restore(tmp_path / "absent.json", Learned(METHODS["ucb"]))
    assert caplog.text == ""
