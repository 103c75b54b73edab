"""What a study comes to: tables for a reader, figures for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """One table. Numbers are shown with up to four significant digits, None as a dash."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        lines = [f"**{self.caption}**", ""]
        lines += [
            "| " + " | ".join(row) + " |" for row in (self.columns, ["---"] * len(self.columns))
        ]
        lines += ["| " + " | ".join(map(_shown, row)) + " |" for row in self.rows]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """One study. `setup` says what was played, `remarks` what the tables show, agreement or not.

    `figures` are the same numbers as plain JSON types.
    """

    name: str
    title: str
    setup: str
    tables: tuple[Table, ...]
    remarks: Sequence[str]
    figures: dict[str, Any]

    def markdown(self) -> str:
        """The study as a section of `docs/evidence.md`."""
        parts = [f"## {self.title}", f"`outrider study {self.name}`. {self.setup}"]
        parts += [table.markdown() for table in self.tables]
        if self.remarks:
            parts.append("\n".join(f"- {remark}" for remark in self.remarks))
        return "\n\n".join(parts) + "\n"

    def json_line(self) -> str:
        """The figures in one line."""
        return json.dumps({"study": self.name, **self.figures}, allow_nan=False)


def _shown(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return str(cell)
    return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:.0f}"
