"""The measured rows of the GPU benchmark, kept with machine and day: results/gpu-rows.jsonl.

A line is one measurement of one row: section, row, machine, day, and its figures. Lines are only appended, so a command
that is cut off keeps what it measured, an earlier figure is never lost, and ``cat`` joins the files of two machines.
A row without a measurement has a ``reason`` (refused, not installed, does not fit) or an ``error``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILE = "gpu-rows.jsonl"
BEGUN = "gpu-row-begun"
"""The file with the section and the name of the row that is being measured."""


def read(folder: Path) -> list[Row]:
    """All lines of a folder's file, oldest first; a line that was written twice counts once.

    Raises SystemExit where a line is no JSON object.
    """
    path = folder / FILE
    rows: dict[str, Row] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        try:
            row = json.loads(line)
            rows.setdefault(line, row | {"day": row["day"]})
        except (ValueError, TypeError, KeyError) as problem:
            raise SystemExit(f"error: {path}:{number}: no row of the GPU benchmark: {problem}") from problem
    return list(rows.values())


def is_measured(row: Mapping[str, Any]) -> bool:
    return "reason" not in row and not isinstance(row.get("error"), str)


class Store:
    """Reads and appends the rows of one machine on one day.

    Args:
        machine: what ``machine.described`` says, with its ``day``.
        tiny: whether its rows are of small models; they have nothing to do with the others.
    """

    def __init__(self, folder: Path, machine: Mapping[str, Any], tiny: bool = False) -> None:
        self._folder, self._day, self._tiny = folder, machine["day"], tiny
        self._machine = {key: value for key, value in machine.items() if key != "day"}
        self._rows = [row for row in read(folder) if row.get("tiny", False) == tiny]
        self._begun = folder / BEGUN
        if self._begun.exists():
            section, name = self._begun.read_text(encoding="utf-8").split("\n")
            self.append(section, name, {"error": "the process ended while it measured this row"})

    def begin(self, section: str, name: str) -> None:
        """Say which row is measured from now on: a row that ends the process is not tried first again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun.write_text(f"{section}\n{name}", encoding="utf-8")

    def append(self, section: str, name: str, figures: Mapping[str, Any]) -> Row:
        """Write one measurement."""
        row = {"section": section, "row": name, "day": self._day, "machine": self._machine, **figures}
        row |= {"tiny": True} if self._tiny else {}
        with (self._folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._begun.unlink(missing_ok=True)
        self._rows.append(row)
        return row

    def last(self, section: str, name: str) -> Row | None:
        """The newest measurement of a row on this kind of accelerator, whatever its day; else its newest line."""
        same = self._machine["accelerators"]
        rows = [
            row
            for row in self._rows
            if (row["section"], row["row"]) == (section, name) and row["machine"]["accelerators"] == same
        ]
        return next((row for row in reversed(rows) if is_measured(row)), rows[-1] if rows else None)

    def measured_today(self, section: str, name: str) -> bool:
        row = self.last(section, name)
        here = row is not None and row["machine"] == self._machine and row["day"] == self._day
        return row is not None and here and is_measured(row)


def completed(folder: Path, wanted: Callable[[Row], bool], fill: Callable[[Row], Row]) -> Iterable[Row]:
    """Add figures to lines that are there, such as predictions; yields each new line after it is written."""
    rows = read(folder)
    for number, row in enumerate(rows):
        if wanted(row):
            rows[number] = row | fill(row)
            new = folder / f"{FILE}.new"
            lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
            new.write_text("".join(lines), encoding="utf-8")
            new.replace(folder / FILE)
            yield rows[number]
