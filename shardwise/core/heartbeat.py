"""A rank's heartbeat: its progress, and the line of its failure, in memory that its launcher reads.

The launcher judges a hang from outside, because a process that is stopped, or whose GIL is held, runs no thread that
could tell. Each rank has one slot and is the only one that writes it. A mark is one store to memory: no lock, no system
call. The error line takes the same way, so it reaches the launcher when the disk of the logs is full.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

HEARTBEAT_VARIABLE = "SHARDWISE_HEARTBEATS"
"""The file descriptor of the slots, which a rank inherits."""

SLOT = 2048
"""Bytes of a slot: more than an error line, which has at most 300 characters, needs in UTF-8."""

ABSENT, RUNNING, ENDED = range(3)
"""States of a rank: it never began, it runs or was lost, it came to its own end."""

# Byte offsets in a slot: five numbers of 8 bytes, then the error line.
_STATE_AT, _MARKS_AT, _STEP_AT, _LIMIT_AT, _LENGTH_AT, _LINE_AT = 0, 8, 16, 24, 32, 40
_UINT64, _DOUBLE = struct.Struct("<Q"), struct.Struct("<d")


@dataclass(frozen=True)
class Beat:
    """What a slot says.

    Attributes:
        marks: counts the rank's progress.
        step: the optimizer step that runs, from 1; 0 before the first.
        limit: seconds without progress after which the run hangs; 0 while the rank is not watched.
        line: the error line; "" without one.
    """

    state: int = ABSENT
    marks: int = 0
    step: int = 0
    limit: float = 0.0
    line: str = ""


class Heartbeat:
    """One rank's slot."""

    def __init__(self, slot: memoryview) -> None:
        self._slot = slot
        self._marks = 0

    def begin(self) -> None:
        _UINT64.pack_into(self._slot, _STATE_AT, RUNNING)

    def mark(self) -> None:
        """Progress was made."""
        self._marks += 1
        _UINT64.pack_into(self._slot, _MARKS_AT, self._marks)

    def at_step(self, number: int) -> None:
        """Optimizer step ``number``, from 1, begins."""
        _UINT64.pack_into(self._slot, _STEP_AT, number)
        self.mark()

    def watch(self, limit: float) -> None:
        """From now on, ``limit`` seconds without a mark on any rank are a hang. 0 ends the watch."""
        _DOUBLE.pack_into(self._slot, _LIMIT_AT, limit)
        self.mark()

    def tell(self, line: str) -> None:
        """Leave the error line for the launcher."""
        text = line.encode("utf-8", "replace")[: SLOT - _LINE_AT]
        self._slot[_LINE_AT : _LINE_AT + len(text)] = text
        _UINT64.pack_into(self._slot, _LENGTH_AT, len(text))

    def end(self) -> None:
        """This rank comes to its own end, well or not."""
        _UINT64.pack_into(self._slot, _STATE_AT, ENDED)

    def read(self) -> Beat:
        state, marks, step = (
            int(_UINT64.unpack_from(self._slot, at)[0]) for at in (_STATE_AT, _MARKS_AT, _STEP_AT)
        )
        length = int(_UINT64.unpack_from(self._slot, _LENGTH_AT)[0])
        line = bytes(self._slot[_LINE_AT : _LINE_AT + length]).decode("utf-8", "replace")
        return Beat(state, marks, step, float(_DOUBLE.unpack_from(self._slot, _LIMIT_AT)[0]), line)


own = Heartbeat(memoryview(bytearray(SLOT)))
"""This process's heartbeat, in memory of its own until ``attach`` finds the launcher's."""


def mark() -> None:
    """This process made progress."""
    own.mark()


def attach() -> None:
    """Begin this rank's heartbeat, in the slot that the launcher gave it, if any."""
    global own
    descriptor = os.environ.pop(
        HEARTBEAT_VARIABLE, None
    )  # the processes that this one starts do not inherit the memory
    if descriptor is not None:
        memory = memoryview(mmap.mmap(int(descriptor), 0))
        os.close(int(descriptor))
        own = Heartbeat(_rank_slots(memory)[int(os.environ["RANK"])])
    own.begin()


@contextmanager
def shared(ranks: int) -> Iterator[tuple[int, list[Heartbeat]]]:
    """New slots for ``ranks`` processes: a descriptor to inherit within the block, and the heartbeats. Raises OSError.

    The memory is not a file's where the system has such, so that a full disk does not matter.
    """
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("heartbeats"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    with file:
        file.truncate(ranks * SLOT)
        yield (
            file.fileno(),
            [Heartbeat(slot) for slot in _rank_slots(memoryview(mmap.mmap(file.fileno(), 0)))],
        )


def _rank_slots(memory: memoryview) -> list[memoryview]:
    return [memory[at : at + SLOT] for at in range(0, len(memory), SLOT)]
