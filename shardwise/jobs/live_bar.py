"""A live bar of a run that other processes train: for notebooks and scripts, where the ranks' output is not seen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, Protocol

from shardwise.core.errors import DataError
from shardwise.core.run_files import StepRecord
from shardwise.report.record import StepLines
from shardwise.train.progress import Progressing, described

SECONDS = 0.5
"""Between two looks at the run's metrics."""


class StepBar(Protocol):
    """Shows the steps of a run."""

    def show(self, metrics: StepRecord) -> None: ...

    def close(self) -> None: ...


@contextmanager
def live_bar(folder: Path, steps: int, shown: bool | None = None) -> Iterator[None]:
    """Show the steps of the run in ``folder`` while the block runs.

    Args:
        steps: of the whole run.
        shown: None shows it in a notebook, and nowhere else.
    """
    notebook = in_notebook()
    if not (notebook if shown is None else shown):
        yield
        return
    bar: StepBar = NotebookBar(steps) if notebook else Progressing(steps, 0)
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

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._handle: Any = None

    def show(self, metrics: StepRecord) -> None:
        from IPython.display import HTML, display

        bar = f'<progress value="{metrics.step}" max="{self._steps}" style="width:16em"></progress>'
        said = escape(described(metrics)).replace("  ", " · ")
        shown = HTML(f"<div>{bar} step {metrics.step} of {self._steps} · {said}</div>")
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def close(self) -> None:
        """The last step stays."""


def _follow(folder: Path, bar: StepBar, done: threading.Event) -> None:
    lines, seen, ended = StepLines(folder / "metrics.jsonl"), 0, False
    while not ended:
        ended = done.wait(SECONDS)  # once more after the end, for the last steps
        try:
            records = lines.read()
        except DataError:  # it is being written anew
            continue
        if records and records[-1].step != seen:
            seen = records[-1].step
            bar.show(records[-1])
    bar.close()
