"""``attempts.jsonl``: every start of a run's ranks, when it trained, and how it ended.

The launcher, and under torchrun and srun rank 0, appends a line before the ranks begin and when they have ended; rank 0
appends one when training begins. A launcher that is killed writes no end, so the start after it says when
``metrics.jsonl`` was last written.
Only the page reads the file, so a line that cannot be written or read is left out.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ATTEMPTS = "attempts.jsonl"
_METRICS = "metrics.jsonl"
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Interruption:
    """What ended an attempt, and its cost.

    Attributes:
        reached: the last step before it.
        resumed: the step of the checkpoint that training continued from.
        cause: the error's line, or that the run was killed.
        seconds: from the end of the attempt to the first step after it.
    """

    reached: int
    resumed: int
    cause: str
    seconds: float

    @property
    def repeated(self) -> int:
        """Steps that were trained twice."""
        return max(0, self.reached - self.resumed)


class Attempts:
    """Appends to the file of a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = False

    def began(self) -> None:
        """The launcher starts the ranks. Starts a new file for a folder without metrics."""
        metrics = self._folder / _METRICS
        if not metrics.exists():
            (self._folder / ATTEMPTS).unlink(missing_ok=True)
        last = metrics.stat().st_mtime if metrics.exists() else None
        self._runs = True
        self._append("began", reached=_last_step(metrics), last=last)

    def training(self, step: int) -> None:
        """Training begins after ``step`` steps."""
        self._append("training", step=step)

    def ended(self, error: str) -> None:
        """The ranks have ended, if they began; "" for a run that reached its end."""
        if self._runs:
            self._append("ended", error=error)
        self._runs = False

    def _append(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **values}) + "\n"
        with contextlib.suppress(OSError), (self._folder / ATTEMPTS).open("a", encoding="utf-8") as file:
            file.write(line)


def interruptions(folder: Path) -> tuple[Interruption, ...]:
    """The interruptions of a run, in order."""
    outages: list[Interruption] = []
    end: tuple[float, str] | None = None
    pending: tuple[int, float, str] | None = None
    before = False
    for line in _json_lines(folder / ATTEMPTS):
        match line:
            case {"event": "ended", "time": float(at), "error": str(error)}:
                end = (at, error)
            case {"event": "began", "reached": int(reached), "last": float(last)} if before:
                at, error = end or (last, "killed: no process of the run was left to say why")
                pending = (reached, at, error) if error else None
                end = None
            case {"event": "training", "time": float(at), "step": int(step)} if pending is not None:
                reached, since, cause = pending
                outages.append(Interruption(reached, step, cause, at - since))
                pending = None
        before = True
    return tuple(outages)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                if isinstance(line := json.loads(text), dict):
                    yield line


def _last_step(metrics: Path) -> int:
    """The step of the last complete line; 0 without one."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError), metrics.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _READ_BYTES))
        return int(json.loads(file.read().split(b"\n")[-2])["step"])
    return 0
