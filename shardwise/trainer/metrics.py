"""Writes ``metrics.jsonl``: one line per optimizer step.

A rewind does not rewrite lines. The lines of the undone steps stay, and the steps that replace them follow with
``rewinds`` one higher. So the last line of a step counts, and a line whose step is not above the step before undoes
all lines from that step on.

A resumed run continues the file after the last line of the checkpoint's step. Later lines were trained but lost, and
are cut off, as is a line that was half written when the process died. The shorter file replaces the old one by a
rename, so a kill loses no line. Lines that are no records are left out, and the old file is kept under another name.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from shardwise.core.atomic_file import write_whole
from shardwise.core.json_file import checked, plain, read_bytes
from shardwise.core.run_files import StepRecord

_Line = tuple[bytes, StepRecord]


class MetricsFile:
    """Appends step records.

    Attributes:
        seconds: step times of this process.
        before: records of the lines that the file had.
    """

    def __init__(self, path: Path, resumed: int, warn: Callable[[str], None] = lambda line: None) -> None:
        """``resumed``: the step of the checkpoint that the run continues from; 0 starts anew."""
        raw = read_bytes(path) if path.exists() else b""
        lines = list(_records(raw)) if resumed else []
        if any(record is None for _, record in lines):
            aside = path.with_name(f"damaged-{path.name}")
            write_whole(aside, raw)
            warn(f"{path.name} has lines that are no records of steps; they are in {aside.name} only")
        trained = _until(resumed, [(line, record) for line, record in lines if record is not None])
        content = b"".join(line + b"\n" for line, _ in trained)
        if content != raw:
            write_whole(path, content)
        # Buffered by line: a killed process loses at most the line that it was writing.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self.seconds: list[float] = []
        self.before = [record for _, record in trained]

    def write(self, metrics: StepRecord) -> None:
        values = {key: value for key, value in plain(metrics).items() if value is not None}
        self._file.write(json.dumps(values) + "\n")
        self.seconds.append(metrics.seconds)

    def sync(self) -> None:
        """Write the lines so far to the disk, before a checkpoint of their last step."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _records(raw: bytes) -> Iterator[tuple[bytes, StepRecord | None]]:
    """The whole lines of a file with their records; None for a line that is no record."""
    for line in raw.split(b"\n")[:-1]:  # after the last newline there is nothing, or half a line
        if line.strip():
            try:
                yield line, checked(line, StepRecord)
            except ValidationError:
                yield line, None


def _until(step: int, lines: list[_Line]) -> list[_Line]:
    """The lines up to the last line of ``step``; without such a line, the lines of earlier steps."""
    steps = [record.step for _, record in lines]
    if step in steps:
        after_last = len(steps) - steps[::-1].index(step)  # a rewound run has several lines of a step
        return lines[:after_last]
    return [line for line, number in zip(lines, steps, strict=True) if number <= step]


def typical_seconds(seconds: list[float], warmup: int) -> float:
    """Median step time after ``warmup`` steps, or of all steps when there are no more."""
    return statistics.median(seconds[warmup:] or seconds)
