"""Writes ``metrics.jsonl``: one line per optimizer step.

A rewind does not rewrite lines. The lines of the undone steps stay, and the steps that replace them follow with
``rewinds`` one higher. So the last line of a step counts, and a line whose step is not above the step before undoes
all lines from that step on.

A resumed run continues the file after the last line of the checkpoint's step. Later lines were trained but lost, and
are cut off, as is a line that was half written when the process died.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from shardwise.core.json_file import plain
from shardwise.core.run_files import StepRecord


class MetricsFile:
    """Appends step records. ``resumed`` is the step of the checkpoint that the run continues from; 0 starts anew."""

    def __init__(self, path: Path, resumed: int) -> None:
        kept = _until(resumed, _whole_lines(path)) if resumed else []
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self.seconds: list[float] = []

    def write(self, metrics: StepRecord) -> None:
        values = {key: value for key, value in plain(metrics).items() if value is not None}
        self._file.write(json.dumps(values) + "\n")
        self.seconds.append(metrics.seconds)

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def _until(step: int, lines: list[str]) -> list[str]:
    """The lines up to the last line of ``step``; without such a line, the lines of earlier steps."""
    steps = [json.loads(line)["step"] for line in lines]
    if step in steps:
        return lines[: len(steps) - steps[::-1].index(step)]
    return [line for line, number in zip(lines, steps, strict=True) if number <= step]


def typical_seconds(seconds: list[float], warmup: int) -> float:
    """Median step time after ``warmup`` steps, or of all steps when there are no more."""
    return statistics.median(seconds[warmup:] or seconds)
