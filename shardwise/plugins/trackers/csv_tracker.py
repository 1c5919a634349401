"""metrics.csv and events.csv, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.core.atomic_file import write_whole
from shardwise.trainer.tracking import RunTracker

METRIC_COLUMNS = (
    "loss", "held_out_loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second",
    "processed_per_second", "skipped", "rewinds", "loss_scale", "peak_bytes",
)  # fmt: skip
"""The first columns of metrics.csv. A number with another name adds a column when it first comes."""

CsvRow = Sequence[Any]


class CsvTracker(RunTracker):
    """Lines of steps after the one that a run resumes from are dropped, as in metrics.jsonl."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics, self._events = folder / "metrics.csv", folder / "events.csv"
        self._columns = _continued(self._metrics, ("step", *METRIC_COLUMNS), run["step"])
        _continued(self._events, ("step", "event", "text"), run["step"])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if new := [name for name in numbers if name not in self._columns]:
            self._columns += new
            _, *rows = _read_rows(self._metrics)
            _write_rows(self._metrics, [self._columns, *rows])
        _append_row(self._metrics, [step, *(numbers.get(name, "") for name in self._columns[1:])])

    def mark(self, step: int, name: str, text: str) -> None:
        _append_row(self._events, [step, name, text])

    def close(self, reason: str) -> None:
        """Every line is on its way to the disk already."""


def _continued(path: Path, header: CsvRow, step: int) -> list[str]:
    """Keep the file's lines up to a step; without a step or a file, write the header alone. Returns the header."""
    first, *rows = (_read_rows(path) if path.exists() and step else []) or [list(header)]
    _write_rows(path, [first, *(row for row in rows if row and int(row[0]) <= step)])
    return first


def _read_rows(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _write_rows(path: Path, rows: Sequence[CsvRow]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_whole(path, text.getvalue().encode())


def _append_row(path: Path, values: CsvRow) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(values)


def open_tracker() -> type[RunTracker]:
    return CsvTracker
