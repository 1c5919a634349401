"""What a terminal shows, as lines of a log: a progress bar that is redrawn becomes one line in a while.

Rank 0's output goes to the terminal and to its log. Control sequences and redrawn frames would fill the log with
megabytes that no reader can use.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

FRAME_SECONDS = 5.0
"""Least seconds between two frames of a bar in the log."""

_CONTROL_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


class CursorState:
    """Follows whether a stream of bytes has left the terminal's cursor hidden."""

    def __init__(self) -> None:
        self.hidden, self._end = False, b""

    def take(self, block: bytes) -> None:
        text = self._end + block
        hide, show = text.rfind(HIDE_CURSOR), text.rfind(SHOW_CURSOR)
        if hide != show:
            self.hidden = hide > show
        self._end = text[1 - len(HIDE_CURSOR) :]


class LogLines:
    """Filters a stream of bytes. Output without control sequences or redrawn lines passes unchanged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._written = -FRAME_SECONDS
        self._line = b""

    def take(self, block: bytes) -> bytes:
        """What the log gets of the next block."""
        if not self._line and b"\x1b" not in block and b"\r" not in block:
            return block
        *lines, self._line = (self._line + block).split(b"\n")
        shown = b"".join(self._frame(line) + _last_frame(line) for line in lines)
        shown += self._frame(self._line)
        self._line = self._line[max(0, self._line.rfind(b"\r")) :]
        return shown

    def rest(self) -> bytes:
        """The last line, which no newline ended."""
        return _last_frame(self._line)

    def _frame(self, line: bytes) -> bytes:
        """The last redrawn frame of a line, if one is due."""
        frames = [frame for part in line.split(b"\r")[:-1] if (frame := _last_frame(part))]
        if not frames or self._clock() - self._written < FRAME_SECONDS:
            return b""
        self._written = self._clock()
        return frames[-1]


def _last_frame(line: bytes) -> bytes:
    """The last frame of a line, without control sequences and with a newline; b"" if nothing is visible."""
    text = _CONTROL_SEQUENCE.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2]).rstrip()
    return text + b"\n" if text else b""
