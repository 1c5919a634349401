"""``metrics.jsonl``: one line per optimizer step, never rewritten.

A resumed run continues the file: lines of steps after the checkpoint were trained but lost, so they are cut off
before the first new line, and a line half written when the process died is cut with them.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did. ``seconds`` is wall time since the step before; ``loss`` is in nats."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    skipped: bool = False
    held_out_loss: float | None = None


class MetricsFile:
    """Appends step metrics. ``resumed`` is the step that the run continues after."""

    def __init__(self, path: Path, resumed: int) -> None:
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= resumed] if resumed else []
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self.seconds: list[float] = []

    def write(self, metrics: StepMetrics) -> None:
        values = asdict(metrics)
        if values["held_out_loss"] is None:
            del values["held_out_loss"]
        self._file.write(json.dumps(values) + "\n")
        self.seconds.append(metrics.seconds)

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def typical_seconds(seconds: list[float], warmup: int) -> float:
    """Median step time after ``warmup`` steps, or of all steps when there are no more."""
    return statistics.median(seconds[warmup:] or seconds)
