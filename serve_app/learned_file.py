"""What an edge node has learned, kept in a file over restarts: one for each pair and method."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from pathlib import Path
from zlib import crc32

from deployments.driver import Models
from policies.controller import Learned
from policies.methods import Method

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0


def learned_path(directory: str, models: Models, name: str, method: Method) -> Path:
    """Where the state of this pair and method lies; a method set otherwise is another one."""
    names = (models.draft.name, models.target.name, name, f"{crc32(repr(method).encode()):08x}")
    stem = "--".join(re.sub(r"[^\w.-]+", "_", name) for name in names)
    return Path(directory).expanduser() / f"{stem}.json"


def restore(path: Path, learned: Learned) -> None:
    """Go on from what lies there, if anything does; what cannot be used is logged and ignored."""
    try:
        learned.restore(json.loads(path.read_text()))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        logger.warning("%s is not used, what was learned is lost: %s", path, error)


def save(path: Path, state: dict[str, object]) -> None:
    """Replace what lies there, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{secrets.token_hex(4)}.new")
    new.write_text(json.dumps(state, allow_nan=False))
    new.replace(path)


async def keep(path: Path, learned: Learned) -> None:
    """Save every SAVE_EVERY_S until cancelled, and once more then. A full disk is only logged."""
    try:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await asyncio.to_thread(_try_to_save, path, learned.state())
    finally:
        _try_to_save(path, learned.state())


def _try_to_save(path: Path, state: dict[str, object]) -> None:
    try:
        save(path, state)
    except OSError as error:
        logger.warning("what was learned cannot be saved: %s", error)
