"""What an edge node has learned, kept over restarts: a file per pair, and one per method on it.

How far to trust the draft's confidence depends on the two models only, so all methods on a pair go
on from one calibration; of two that run at once on a node, the last to save has it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from deployments.driver import Models
from policies.controller import Learned
from policies.methods import Method

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class LearnedFiles:
    """Where the calibration of a pair lies, and the rest of what was learned by one method."""

    calibration: Path
    method: Path


def learned_files(directory: str, models: Models, name: str, method: Method) -> LearnedFiles:
    """The files of this pair and method; a method set otherwise is another one."""
    pair = (models.draft.name, models.target.name)

    def path(*names: str) -> Path:
        stem = "--".join(re.sub(r"[^\w.-]+", "_", name) for name in (*pair, *names))
        return Path(directory).expanduser() / f"{stem}.json"

    return LearnedFiles(path("calibration"), path(name, f"{crc32(repr(method).encode()):08x}"))


def restore(files: LearnedFiles, learned: Learned) -> None:
    """Go on from what lies there, if anything does; what cannot be used is logged and ignored."""
    for path, take in (
        (files.calibration, learned.restore_calibration),
        (files.method, learned.restore),
    ):
        try:
            take(json.loads(path.read_text()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            logger.warning("%s is not used, what was learned is lost: %s", path, error)


def save(path: Path, state: Mapping[str, object]) -> None:
    """Replace what lies there, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{secrets.token_hex(4)}.new")
    new.write_text(json.dumps(state, allow_nan=False))
    new.replace(path)


async def keep(files: LearnedFiles, learned: Learned) -> None:
    """Save every SAVE_EVERY_S until cancelled, and once more then. A full disk is only logged."""
    try:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await asyncio.to_thread(_try_to_save, _states(files, learned))
    finally:
        _try_to_save(_states(files, learned))


def _states(files: LearnedFiles, learned: Learned) -> dict[Path, dict[str, Any]]:
    return {files.calibration: learned.calibration.state(), files.method: learned.state()}


def _try_to_save(states: Mapping[Path, Mapping[str, object]]) -> None:
    try:
        for path, state in states.items():
            save(path, state)
    except OSError as error:
        logger.warning("what was learned cannot be saved: %s", error)
