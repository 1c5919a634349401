"""``metrics.jsonl``: one line per optimizer step, never rewritten.

A rewind is in the file as it happened: the lines of the steps that were undone stay, the steps that take their
place follow with ``rewinds`` one higher. Of several lines of a step the last one is true, and a step number that
is not above the one before undoes all from it on.

A resumed run continues the file: lines after the last one of the checkpoint's step were trained but lost, so they
are cut off before the first new line, and a line half written when the process died is cut with them.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did.

    ``seconds`` is wall time since the step before; ``loss`` is in nats; ``rewinds`` counts those before it. What
    is None is left out.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    skipped: bool = False
    held_out_loss: float | None = None
    rewinds: int | None = None


class MetricsFile:
    """Appends step metrics. ``resumed`` is the step that the run continues after."""

    def __init__(self, path: Path, resumed: int) -> None:
        kept = _until(resumed, _whole_lines(path)) if resumed else []
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self.seconds: list[float] = []

    def write(self, metrics: StepMetrics) -> None:
        values = {key: value for key, value in asdict(metrics).items() if value is not None}
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
    """All up to the last line of ``step``; where it has none, those of steps before it."""
    steps = [json.loads(line)["step"] for line in lines]
    if step in steps:
        return lines[: len(steps) - steps[::-1].index(step)]
    return [line for line, number in zip(lines, steps, strict=True) if number <= step]


def typical_seconds(seconds: list[float], warmup: int) -> float:
    """Median step time after ``warmup`` steps, or of all steps when there are no more."""
    return statistics.median(seconds[warmup:] or seconds)
