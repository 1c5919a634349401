"""The progress of a run that other processes train: for notebooks and scripts, where the ranks' output is not seen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from shardwise.core.counted import TOKENS, Units
from shardwise.core.errors import DataError
from shardwise.core.run_files import StepRecord
from shardwise.report.record import StepLines, read_run
from shardwise.trainer.progress import Progressing, step_in_words

METRICS_POLL_SECONDS = 0.5
"""Between two looks at the run's metrics."""

LINE_SECONDS = 10.0
"""Between two lines of a script."""


class StepBar(Protocol):
    """Shows the steps of a run."""

    def show(self, metrics: StepRecord) -> None: ...

    def close(self) -> None: ...


@contextmanager
def live_bar(folder: Path, steps: int, shown: bool | None = None) -> Iterator[None]:
    """Show the steps of the run in ``folder`` while the block runs.

    Args:
        steps: of the whole run.
        shown: True is a bar, False is nothing. None is a bar in a notebook, and a line on standard error now and then
            in a script.
    """
    if shown is False:
        yield
        return

    def bar(units: Units) -> StepBar:
        if in_notebook():
            return NotebookBar(steps, units)
        console = Console(stderr=True, highlight=False, force_terminal=False) if shown is None else None
        return Progressing(steps, 0, console, units, LINE_SECONDS)

    done = threading.Event()
    thread = threading.Thread(target=_follow, args=(folder, bar, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBar:
    """One output of a cell that changes in place."""

    def __init__(self, steps: int, units: Units = TOKENS) -> None:
        self._steps, self._units = steps, units
        self._handle: Any = None

    def show(self, metrics: StepRecord) -> None:
        from IPython.display import HTML, display

        bar = f'<progress value="{metrics.step}" max="{self._steps}" style="width:16em"></progress>'
        said = escape(step_in_words(metrics, self._units)).replace("  ", " · ")
        shown = HTML(f"<div>{bar} step {metrics.step} of {self._steps} · {said}</div>")
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def close(self) -> None:
        """The last step stays."""


def _follow(folder: Path, make: Callable[[Units], StepBar], done: threading.Event) -> None:
    """Show lines that are added to the run's metrics, until ``done``; ``make`` a bar when its plan is known."""
    lines = StepLines(folder / "metrics.jsonl")
    seen = 0
    ended = False
    bar: StepBar | None = None
    while not ended:
        ended = done.wait(METRICS_POLL_SECONDS)  # once more after the end, for the last steps
        try:
            records = lines.read()
            if records and bar is None:
                bar = make(read_run(folder, records).plan.step.units)
        except DataError:  # they are being written anew
            continue
        if bar is not None and records and records[-1].step != seen:
            seen = records[-1].step
            bar.show(records[-1])
    if bar is not None:
        bar.close()
