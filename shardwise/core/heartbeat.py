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

VARIABLE = "SHARDWISE_HEARTBEATS"
"""The file descriptor of the slots, which a rank inherits."""

SLOT = 2048
"""Bytes of a slot: more than an error line, which has at most 300 characters, needs in UTF-8."""

ABSENT, RUNNING, ENDED = range(3)
"""States of a rank: it never began, it runs or was lost, it came to its own end."""

_STATE, _MARKS, _STEP, _LIMIT, _LENGTH, _LINE = 0, 8, 16, 24, 32, 40
_INTEGER, _FLOAT = struct.Struct("<Q"), struct.Struct("<d")


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
        _INTEGER.pack_into(self._slot, _STATE, RUNNING)

    def mark(self) -> None:
        """Progress was made."""
        self._marks += 1
        _INTEGER.pack_into(self._slot, _MARKS, self._marks)

    def at_step(self, number: int) -> None:
        """Optimizer step ``number``, from 1, begins."""
        _INTEGER.pack_into(self._slot, _STEP, number)
        self.mark()

    def watch(self, limit: float) -> None:
        """From now on, ``limit`` seconds without a mark on any rank are a hang. 0 ends the watch."""
        _FLOAT.pack_into(self._slot, _LIMIT, limit)
        self.mark()

    def tell(self, line: str) -> None:
        """Leave the error line for the launcher."""
        text = line.encode("utf-8", "replace")[: SLOT - _LINE]
        self._slot[_LINE : _LINE + len(text)] = text
        _INTEGER.pack_into(self._slot, _LENGTH, len(text))

    def end(self) -> None:
        """This rank comes to its own end, well or not."""
        _INTEGER.pack_into(self._slot, _STATE, ENDED)

    def read(self) -> Beat:
        state, marks, step = (int(_INTEGER.unpack_from(self._slot, at)[0]) for at in (_STATE, _MARKS, _STEP))
        length = int(_INTEGER.unpack_from(self._slot, _LENGTH)[0])
        line = bytes(self._slot[_LINE : _LINE + length]).decode("utf-8", "replace")
        return Beat(state, marks, step, float(_FLOAT.unpack_from(self._slot, _LIMIT)[0]), line)


own = Heartbeat(memoryview(bytearray(SLOT)))
"""This process's heartbeat, in memory of its own until ``attach`` finds the launcher's."""


def mark() -> None:
    """This process made progress."""
    own.mark()


def attach() -> None:
    """Begin this rank's heartbeat, in the slot that the launcher gave it, if any."""
    global own
    descriptor = os.environ.pop(
        VARIABLE, None
    )  # the processes that this one starts do not inherit the memory
    if descriptor is not None:
        memory = memoryview(mmap.mmap(int(descriptor), 0))
        os.close(int(descriptor))
        own = Heartbeat(_slots(memory)[int(os.environ["RANK"])])
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
        yield file.fileno(), [Heartbeat(slot) for slot in _slots(memoryview(mmap.mmap(file.fileno(), 0)))]


def _slots(memory: memoryview) -> list[memoryview]:
    return [memory[at : at + SLOT] for at in range(0, len(memory), SLOT)]
