"""What happens when nobody reads the output any more, as in ``shardwise train … | head -3``: nothing.

Training goes on, a plan that does not fit still exits with 7; only text that is made to be read ends. Everything above
a closed pipe gives up instead: typer and rich end the process with exit code 1, and Python's own print raises. So the
error is caught below all of them, in the file that writes to the descriptor: the first time it comes, the descriptor is
led to nowhere, for whoever else writes to it too. Refused: the signal's default action, which ends the process; and
handlers around every print.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T")
_unread: set[int] = set()
"""Descriptors that nobody reads any more."""


def while_read(pieces: Iterable[T]) -> Iterator[T]:
    """Pieces of what is only made to be shown, until nobody reads standard output any more."""
    for piece in pieces:
        if 1 in _unread:
            return
        yield piece


class _Unbroken(io.FileIO):
    """A descriptor that takes what it is given, also when nobody reads it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _unread.add(self.fileno())
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def keep_writing() -> None:
    """Let this process's standard output and error outlive their readers. For a process of our own, at its start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # closed from the start, it is None
            setattr(sys, name, _unbroken(stream))


def _unbroken(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream like this one, buffered as it is."""
    stream.flush()
    raw, buffer = _Unbroken(stream.fileno(), "w", closefd=False), cast("Any", stream.buffer)
    below: Any = raw if isinstance(buffer, io.RawIOBase) else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        below,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
