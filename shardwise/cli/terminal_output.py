"""Keeps a command running when the reader of its output has gone, as in ``shardwise train … | head -3``.

Training goes on, and a plan that does not fit still exits with 7. Without this, a closed pipe ends the command: typer
and rich exit with code 1, and Python's print raises. So the error is caught in the raw file that writes to the
descriptor. At the first error the descriptor is redirected to the null device. SIGPIPE's default action would end the
process instead.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T")
_unread: set[int] = set()
"""Descriptors whose readers have gone."""


def while_read(pieces: Iterable[T]) -> Iterator[T]:
    """The pieces, until the reader of standard output has gone; for output that is made only to be read."""
    for piece in pieces:
        if 1 in _unread:
            return
        yield piece


class _Unbroken(io.FileIO):
    """A descriptor that accepts writes after its reader has gone."""

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
    """Let this process write after the readers of its standard output and error have gone. Call it at the start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # closed from the start, it is None
            setattr(sys, name, _unbroken(stream))


def _unbroken(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream with the same buffering, on an `_Unbroken` file."""
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
