"""The progress of a run: a bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise.core.counted import TOKENS, Units
from shardwise.core.figures import measure_label
from shardwise.core.run_files import StepRecord
from shardwise.core.units import format_bytes, format_seconds

PLAIN_SECONDS = 5.0
"""Without a terminal: least time between two lines, except for the last step."""

PLAIN_WIDTH = 100
"""Without a terminal: most columns of a line with measures. The peak and the last measures are left out."""

NARROWEST_BAR, WIDEST_BAR = 10, 40

MEASURES = "measures"
"""Begins the names of figures that are measures of the objective, or metrics."""

VALIDATED = f"{MEASURES} of the validation data"

DROPPED = ("peak", MEASURES, "bar", "rate", "validation", "left")
"""What a narrow terminal does without, in this order; of the measures the last one first. The step and the loss stay.
"""


class Progressing:
    """Shows each step.

    Args:
        resumed: steps that were done before.
        units: what the run reads and trains on.
        seconds: without a terminal, least time between two lines.
    """

    def __init__(
        self,
        steps: int,
        resumed: int,
        console: Console | None = None,
        units: Units = TOKENS,
        seconds: float = PLAIN_SECONDS,
    ) -> None:
        self._console = console or Console(highlight=False)
        self._seconds = seconds
        self._steps = steps
        self._last_line = 0.0
        self._line = StepLine(steps, resumed, units)
        self._bar: Live | None = None
        if self._console.is_terminal:
            # The standard error of a rank is its log: a trace, or a warning, belongs there and not above the bar.
            self._bar = Live(
                self._line,
                console=self._console,
                refresh_per_second=10,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._bar.start()

    def show(self, metrics: StepRecord) -> None:
        now = time.monotonic()
        self._line.update(metrics, now)
        if self._bar is not None:
            return
        evaluated = metrics.held_out_loss is not None or metrics.held_out_losses
        due = now - self._last_line >= self._seconds or evaluated
        if due or metrics.step == self._steps:
            self._last_line = now
            self._console.print(self._line.plain(metrics), soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class StepLine:
    """The last step on one line of a terminal: as much of it as there is room for."""

    def __init__(self, steps: int, resumed: int, units: Units = TOKENS) -> None:
        self._steps = steps
        self._resumed = resumed
        self._units = units
        self._metrics: StepRecord | None = None
        self._first = (0, 0.0)  # the first step that was shown, and when
        self.left = 0.0

    def update(self, metrics: StepRecord, now: float) -> None:
        """Show this step. The time that is left is that of the mean step since the first one, which is slower."""
        if self._metrics is None:
            self._first = metrics.step, now
        step, began = self._first
        mean = (now - began) / (metrics.step - step) if metrics.step > step else metrics.seconds
        self._metrics = metrics
        self.left = (self._steps - metrics.step) * mean

    def plain(self, metrics: StepRecord) -> str:
        """The line without a terminal."""
        figures = {"step": f"step {metrics.step}/{self._steps}", **figures_of(metrics, self._units)}
        figures["left"] = self._left()
        measures = _measures_last_first(figures)
        droppable = ["peak", *measures] if measures else []
        for name in droppable:
            if len("  ".join(figures.values())) > PLAIN_WIDTH:
                del figures[name]
        return "  ".join(figures.values())

    def _left(self) -> str:
        # From 59.5 s on, whole seconds would read "60 s".
        duration = f"{self.left:.0f} s" if self.left < 59.5 else format_seconds(self.left)
        return f"{duration} left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done = self._resumed if self._metrics is None else self._metrics.step
        figures = {} if self._metrics is None else dict(self._figures(self._metrics))
        head = f"step {done}/{self._steps}"
        order = _drop_order(figures)
        # Drop one figure after the other, until there is room for the rest, and for a bar if that is not dropped.
        for count in range(len(order) + 1):
            dropped = order[:count]
            text = "  ".join(figure for name, figure in figures.items() if name not in dropped)
            room = options.max_width - 1 - len(head) - len(text) - 3
            if room >= (0 if "bar" in dropped else NARROWEST_BAR):
                break
        row = Table.grid(padding=(0, 2, 0, 0))
        cells: list[Text | ProgressBar] = [Text(head, no_wrap=True)]
        if "bar" not in dropped:
            width = min(room, WIDEST_BAR)
            cells.append(ProgressBar(total=self._steps, completed=done, width=width))
        row.add_row(*cells, Text(text, no_wrap=True, overflow="ellipsis"))
        yield row

    def _figures(self, metrics: StepRecord) -> Iterator[tuple[str, str]]:
        yield from figures_of(metrics, self._units).items()
        if metrics.step < self._steps:
            yield "left", self._left()


def _drop_order(figures: Mapping[str, str]) -> list[str]:
    """The names of figures, and ``bar``, in the order of DROPPED."""
    order: list[str] = []
    for figure in DROPPED:
        order += _measures_last_first(figures) if figure == MEASURES else [figure]
    return order


def _measures_last_first(figures: Mapping[str, str]) -> list[str]:
    """The names of measures, the last one first; those of the step before those of the validation data."""
    last_first = [name for name in reversed(list(figures)) if name.startswith(MEASURES)]
    # The sort is stable: the order within each of both stays.
    return sorted(last_first, key=lambda name: name.startswith(VALIDATED))


def figures_of(metrics: StepRecord, units: Units = TOKENS) -> Mapping[str, str]:
    """The figures of a step in words: its loss and measures, those of the validation data, the rate, the peak of
    memory.
    """
    losses = [] if metrics.held_out_loss is None else [f"validation loss {metrics.held_out_loss:.4f}"]
    losses += [f"{name} {loss:.4f}" for name, loss in (metrics.held_out_losses or {}).items()]
    figures = {"loss": f"loss {metrics.loss:.4f}", **_measures(f"{MEASURES} of the step", metrics.measures)}
    if losses:
        figures["validation"] = "  ".join(losses)
    figures |= _measures(VALIDATED, metrics.metrics)
    figures["rate"] = _rates(metrics, units)
    figures["peak"] = f"peak {format_bytes(metrics.peak_bytes or 0)}"
    return figures


def _measures(of: str, values: Mapping[str, float] | None) -> dict[str, str]:
    return {f"{of}: {n}": f"{measure_label(n)} {v:.4g}" for n, v in (values or {}).items()}


def step_in_words(metrics: StepRecord, units: Units = TOKENS) -> str:
    """The figures of a step in a line."""
    return "  ".join(figures_of(metrics, units).values())


def _rates(metrics: StepRecord, units: Units) -> str:
    """Tokens per second; where padding and prompts are computed too, those that are trained on apart; or samples."""
    trained = metrics.tokens_per_second
    processed = metrics.processed_per_second
    if units.read == "samples":
        return f"{processed or 0:,.0f} samples/s"
    if units == TOKENS:
        if processed is None or trained > 0.95 * processed:  # too little padding to mention
            return f"{trained:,.0f} tokens/s"
        return f"{processed:,.0f} tokens/s, {trained:,.0f} trained"
    rates = [] if processed is None else [f"{processed:,.0f} tokens/s"]
    number = f"{trained:,.0f}" if trained >= 10 else f"{trained:.2g}"
    return ", ".join([*rates, f"{number} {units.trained}/s"])
