"""Keeps a command running when its output cannot be written: the reader has gone (``shardwise train … | head -3``), or
the disk of the file that it goes to is full.

Training goes on, and a plan that does not fit still exits with 7. Without this, a closed pipe ends the command: typer
and rich exit with code 1, and Python's print raises. So the error is caught in the raw file that writes to the
descriptor. Without a reader the descriptor is redirected to the null device. SIGPIPE's default action would end the
process instead. On a full disk the text is dropped, and a command that otherwise succeeds exits with 7.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

from shardwise.core.atomic_file import DISK_FULL_ERRORS

T = TypeVar("T")
_closed_descriptors: set[int] = set()
"""Descriptors whose readers have gone."""
_write_errors: list[OSError] = []
"""Errors of text that a full disk did not take."""


def dropped_output() -> OSError | None:
    """The first error of text that a full disk did not take; None if all was written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    return _write_errors[0] if _write_errors else None


def while_read(pieces: Iterable[T]) -> Iterator[T]:
    """The pieces, until the reader of standard output has gone; for output that is made only to be read."""
    for piece in pieces:
        if 1 in _closed_descriptors:
            return
        yield piece


class _Unbroken(io.FileIO):
    """A descriptor that accepts writes after its reader has gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _closed_descriptors.add(self.fileno())
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                raise
            _write_errors.append(error)
            return memoryview(data).nbytes


def keep_writing() -> None:
    """Let this process write after the readers of its standard output and error have gone. Call it at the start."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # closed from the start, it is None
            setattr(sys, name, _unbroken(stream))


def _unbroken(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream with the same buffering, on an `_Unbroken` file."""
    stream.flush()
    raw = _Unbroken(stream.fileno(), "w", closefd=False)
    buffer = cast("Any", stream.buffer)
    below: Any = raw if isinstance(buffer, io.RawIOBase) else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        below,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
