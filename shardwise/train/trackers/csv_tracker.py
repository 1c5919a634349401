"""metrics.csv and events.csv, for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.core.atomic_file import write_whole
from shardwise.train.trackers.base import RunTracker

COLUMNS = (
    "loss", "held_out_loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second",
    "processed_per_second", "skipped", "rewinds", "loss_scale", "peak_bytes",
)  # fmt: skip


class CsvTracker(RunTracker):
    """Lines of steps after the one that a run resumes from are dropped, as in metrics.jsonl."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _continued(folder / "metrics.csv", ("step", *COLUMNS), run["step"])
        self._events = _continued(folder / "events.csv", ("step", "event", "text"), run["step"])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        _append(self._metrics, [step, *(numbers.get(name, "") for name in COLUMNS)])

    def mark(self, step: int, name: str, text: str) -> None:
        _append(self._events, [step, name, text])

    def close(self, reason: str) -> None:
        """Every line is on its way to the disk already."""


def _continued(path: Path, header: tuple[str, ...], step: int) -> Path:
    """The file with its lines up to a step, or with the header alone."""
    lines = [list(header)]
    if path.exists() and step:
        with path.open(newline="", encoding="utf-8") as file:
            lines += [line for line in list(csv.reader(file))[1:] if line and int(line[0]) <= step]
    write_whole(path, b"")
    for line in lines:
        _append(path, line)
    return path


def _append(path: Path, values: list[Any]) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(values)


def open_tracker() -> type[RunTracker]:
    return CsvTracker
