"""What the planner is doing, in one line that changes in place: in a terminal only, and nothing in a pipe or a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.core.errors import one_line
from shardwise.core.progress import Progress

SPINNER = 3
"""Columns of the spinner, with the blanks around it."""


@contextmanager
def planning() -> Iterator[Progress]:
    """Show a spinner on standard error while the block runs; the block is given the function that says more.

    A line that is longer than the terminal is cut, because a line that wraps cannot be replaced.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status("planning") as status:

        def show(line: str) -> None:
            said = Text(f"planning: {one_line(line)}")
            said.truncate(max(1, console.width - SPINNER), overflow="ellipsis")
            status.update(said)

        yield show
