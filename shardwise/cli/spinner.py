"""What a command is doing, in one line that changes in place: in a terminal only, and nothing in a pipe or a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.core.errors import one_line

if TYPE_CHECKING:
    from rich.status import Status

SPINNER = 3
"""Columns of the spinner, with the blanks around it."""


class Working:
    """A line on standard error with a spinner. A call shows the line, and starts the spinner if it has stopped.

    A line that is longer than the terminal is cut, because a line that wraps cannot be replaced.
    """

    def __init__(self, task: str = "") -> None:
        """``task``: stands before every line."""
        from rich.console import Console

        self._task = task
        self._console = Console(stderr=True)
        self._status: Status | None = None

    def __call__(self, line: str) -> None:
        if not self._console.is_terminal:
            return
        from rich.text import Text

        said = Text(one_line(f"{self._task}: {line}" if self._task else line))
        said.truncate(max(1, self._console.width - SPINNER), overflow="ellipsis")
        if self._status is None:
            self._status = self._console.status(said)
            self._status.start()
        else:
            self._status.update(said)

    def stop(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def stopping(self, say: Callable[[str], object]) -> Callable[[str], None]:
        """``say``, which first takes the line away: both may write to one terminal."""

        def said(sentence: str) -> None:
            self.stop()
            say(sentence)

        return said


@contextmanager
def working(line: str = "") -> Iterator[Working]:
    """Show a line while the block runs; the block is given the function that says more."""
    shown = Working()
    try:
        if line:
            shown(line)
        yield shown
    finally:
        shown.stop()


@contextmanager
def planning() -> Iterator[Working]:
    """As ``working``, for the planner's lines."""
    shown = Working("planning")
    try:
        yield shown
    finally:
        shown.stop()
