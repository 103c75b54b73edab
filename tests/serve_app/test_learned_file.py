"""What is learned outlives the driver, and a file that is no use does not stop it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from policies.bandit import UcbSpecStop
from policies.controller import Learned
from policies.methods import METHODS
from serve_app.learned_file import LearnedFiles, restore, save
from tests.serve_app.server import TEXT, serving
from tests.serve_app.test_telemetry import turns_until

BODY = {"prompt": "once", "max_tokens": 60, "temperature": 0}


async def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "directory"
    config = {"policy.method": "ucb", "policy.state_dir": str(directory)}
    async with serving(**config) as server, server.app.router.lifespan_context(server.app):
        await turns_until(lambda: server.api.learned_files is not None)
        for _ in range(4):
            await server.client.post(TEXT, json=BODY)
        assert server.api.learned is not None
        before, calibration = server.api.learned.state(), server.api.learned.calibration.state()
    of_pair, of_method = names_in(directory)
    assert of_pair == "toy-target--toy-target--calibration.json"
    assert of_method.startswith("toy-target--toy-target--ucb--")
    async with serving(**config) as server, server.app.router.lifespan_context(server.app):
        await turns_until(lambda: server.api.learned_files is not None)
        assert server.api.learned is not None
        assert server.api.learned.state() == before
        assert server.api.learned.calibration.state() == calibration
    assert calibration["observations"] > 0


async def test_another_method_on_the_pair_goes_on_from_the_same_calibration(tmp_path: Path) -> None:
    learned = []
    for method in ("ucb", "outrider"):
        config = {"policy.method": method, "policy.state_dir": str(tmp_path)}
        async with serving(**config) as server, server.app.router.lifespan_context(server.app):
            await turns_until(lambda: server.api.learned_files is not None)
            learned.append(server.api.learned)
            if method == "ucb":
                await server.client.post(TEXT, json=BODY)
    ucb, outrider = learned
    assert ucb is not None
    assert outrider is not None
    assert outrider.calibration.state() == ucb.calibration.state()
    assert outrider.calibration.observations > 0
    assert len(names_in(tmp_path)) == 3


def names_in(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def files_in(directory: Path) -> LearnedFiles:
    return LearnedFiles(directory / "calibration.json", directory / "method.json")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "other"}', "NaN"])
@pytest.mark.parametrize("name", ["calibration", "method"])
def test_a_file_that_is_no_use_is_told_and_the_other_one_used(
    tmp_path: Path, name: str, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    files, known, learned = files_in(tmp_path), Learned(METHODS["ucb"]), Learned(METHODS["ucb"])
    assert isinstance(known.bandit, UcbSpecStop)
    known.bandit.update(3, 100.0, 2)
    known.calibration.observe(0.9, True)
    save(files.calibration, known.calibration.state())
    save(files.method, known.state())
    bad = getattr(files, name)
    bad.write_text(content)
    restore(files, learned)
    assert [str(bad) in record.message for record in caplog.records] == [True]
    assert (learned.calibration.observations == 1) == (name == "method")
    assert (learned.state() == known.state()) == (name == "calibration")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path, learned = tmp_path / "state.json", Learned(METHODS["ucb"])
    path.write_text("{")
    save(path, learned.state())
    assert json.loads(path.read_text()) == learned.state()
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_there_is_nothing_to_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    restore(files_in(tmp_path), Learned(METHODS["ucb"]))
    assert caplog.text == ""
