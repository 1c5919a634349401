"""The progress of a run: a bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from shardwise.core.plan import Unit
from shardwise.core.run_files import StepRecord
from shardwise.core.units import format_bytes

PLAIN_SECONDS = 5.0


class Progressing:
    """Shows each step.

    Args:
        resumed: steps that were done before.
        unit: what the run reads.
        seconds: without a terminal, least time between two lines.
    """

    def __init__(
        self,
        steps: int,
        resumed: int,
        console: Console | None = None,
        unit: Unit = "tokens",
        seconds: float = PLAIN_SECONDS,
    ) -> None:
        self._console, self._seconds = console or Console(highlight=False), seconds
        self._steps, self._unit = steps, unit
        self._last_line = 0.0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns: list[ProgressColumn] = [
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            ]
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=steps, completed=resumed)
            self._bar.start()

    def show(self, metrics: StepRecord) -> None:
        text = described(metrics, self._unit)
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, description=text)
            return
        now = time.monotonic()
        evaluated = metrics.held_out_loss is not None or metrics.held_out_losses
        due = now - self._last_line >= self._seconds or evaluated
        if due or metrics.step == self._steps:
            self._last_line = now
            remaining = (self._steps - metrics.step) * metrics.seconds
            self._console.print(
                f"step {metrics.step}/{self._steps}  {text}  {remaining:,.0f} s left", soft_wrap=True
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def described(metrics: StepRecord, unit: Unit = "tokens") -> str:
    """The figures of a step in a line."""
    held_out = "" if metrics.held_out_loss is None else f"  validation loss {metrics.held_out_loss:.4f}"
    for name, loss in (metrics.held_out_losses or {}).items():
        held_out += f"  {name} {loss:.4f}"
    for name, value in (metrics.metrics or {}).items():
        held_out += f"  {name} {value:.4g}"
    return f"loss {metrics.loss:.4f}{held_out}  {_rates(metrics, unit)}  peak {format_bytes(metrics.peak_bytes or 0)}"


def _rates(metrics: StepRecord, unit: Unit) -> str:
    """Tokens per second; where padding and prompts are computed too, those that are trained on apart. Or samples."""
    trained, processed = metrics.tokens_per_second, metrics.processed_per_second
    if unit == "samples":
        return f"{processed or 0:,.0f} samples/s"
    if processed is None or trained > 0.95 * processed:
        return f"{trained:,.0f} tokens/s"
    return f"{processed:,.0f} tokens/s, {trained:,.0f} trained"
