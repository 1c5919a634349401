"""Scratch files for NVMe offload: tensors in a file, moved through memory in pieces with read-ahead and write-behind.

The file is allocated in full when a run is built, so a full disk fails at once. It is unlinked once open, so nothing
remains after the process; ``ls`` does not show it, but ``df`` and ``/proc/PID/fd`` do. There is no ``fsync``:
checkpoints, not this file, survive a crash.

Reads and writes are explicit (``preadv``, ``pwritev``) into the caller's buffers, on a few threads without the GIL.
Refused: computing on a memory map, whose pages count as process memory, fault one by one, and turn a full disk into a
signal (a map only hands tensors to checkpoints); ``O_DIRECT``, which needs sector-aligned rows and is missing from some
file systems.

Operations are dispatcher operators, so the dry run, whose tensors are fake, counts disk bytes and traffic without a
file. They return at once; ``wait`` waits for all operations of one slot, a number chosen by the caller.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.errors import RecipeError, ResourceError, ShardwiseError
from shardwise.core.units import format_bytes

ALIGNMENT = mmap.ALLOCATIONGRANULARITY
"""Alignment of tensors in the file, bytes; a memory map can begin there."""

THREADS = 4


class ScratchFile:
    """One open file without a name."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        if not folder.is_dir():
            why = "it is not a folder" if folder.exists() else "there is no such folder"
            raise RecipeError(
                "state cannot be offloaded", where=f"offload: nvme:{folder}", why=why, fix="name a folder"
            )
        try:
            self._descriptor = _reserved_file(folder, max(size, 1))
        except OSError as error:
            raise self._error(error, "reserve") from error
        self._map: weakref.ref[mmap.mmap] | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shardwise-disk")
        self._pending: dict[int, list[Future[None]]] = {}
        self._writes: dict[int, Future[None]] = {}  # by offset; a later read at the offset waits for it

    def submit(self, part: Callable[..., int], tensor: Tensor, offset: int, slot: int) -> None:
        """Read (preadv) or write (pwritev) a contiguous tensor at ``offset``, after the last write there."""
        before = self._writes.pop(offset, None)
        if before is not None:
            self._result(before)
        view: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
        future = self._threads.submit(_transfer, part, self._descriptor, view, offset)
        self._pending.setdefault(slot, []).append(future)
        if part is os.pwritev:
            self._writes[offset] = future

    def wait(self, slot: int | None = None) -> None:
        """Wait for the operations of a slot, or for all. Raises ResourceError for the first that failed."""
        for number in [slot] if slot is not None else list(self._pending):
            for future in self._pending.pop(number, ()):
                self._result(future)

    def mapped(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A part of the file as a tensor; writes to it go to the file."""
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._whole(), dtype=dtype, count=shape.numel(), offset=offset).view(shape)

    def _whole(self) -> mmap.mmap:
        """One memory map shared by all tensors while they exist; each map takes a file descriptor."""
        area = self._map() if self._map is not None else None
        if area is None:
            area = mmap.mmap(self._descriptor, max(self.size, 1))
            self._map = weakref.ref(area)
        return area

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)

    def _result(self, future: Future[None]) -> None:
        try:
            future.result()
        except OSError as error:
            raise self._error(error, "read or write") from error

    def _error(self, error: OSError, what: str) -> ShardwiseError:
        why = f"{error.strerror or error}, {format_bytes(self.size)} needed"
        with contextlib.suppress(OSError):
            why += f", {format_bytes(shutil.disk_usage(self.folder).free)} free"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return ResourceError(
            f"cannot {what} the file of offloaded state",
            where=f"offload: nvme:{self.folder}",
            why=why,
            fix="free some space or name another folder" if full else "name a folder on a disk that works",
        )


def _reserved_file(folder: Path, size: int) -> int:
    """Descriptor of a new unnamed file with ``size`` bytes allocated on the disk."""
    descriptor, path = tempfile.mkstemp(prefix="shardwise-", dir=folder)
    # The file is freed with the process, also after a kill.
    os.unlink(path)
    try:
        # A full disk is met here, not by a write within a step.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _transfer(part: Callable[..., int], descriptor: int, view: memoryview, offset: int) -> None:
    """Read or write a whole view; one system call may transfer only a part."""
    while view:
        count = part(descriptor, [view], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early")
        view = view[count:]
        offset += count


# -- the operators ------------------------------------------------------------------------------------

_OPEN_FILES: dict[str, ScratchFile] = {}
_LOCK = threading.Lock()

_DISK_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")  # lives as long as the process
_DISK_LIBRARY.define("disk_reserve(Tensor anchor, str file, str folder, int size) -> ()")
_DISK_LIBRARY.define("disk_read(Tensor(a!) into, str file, int offset, int slot) -> ()")
_DISK_LIBRARY.define("disk_write(Tensor what, str file, int offset, int slot) -> ()")


def _reserve(anchor: Tensor, file: str, folder: str, size: int) -> None:
    opened = ScratchFile(Path(folder), size)
    with _LOCK:
        _OPEN_FILES[file] = opened


def _disk_read(into: Tensor, file: str, offset: int, slot: int) -> None:
    _OPEN_FILES[file].submit(os.preadv, into, offset, slot)


def _disk_write(what: Tensor, file: str, offset: int, slot: int) -> None:
    _OPEN_FILES[file].submit(os.pwritev, what, offset, slot)


def _fake_transfer(*_: object) -> None:
    """On fake tensors the tracker counts the operation, and nothing is done."""


for _name, _function in {
    "disk_reserve": _reserve,
    "disk_read": _disk_read,
    "disk_write": _disk_write,
}.items():
    _DISK_LIBRARY.impl(_name, _function, "CPU")
    torch.library.register_fake(f"shardwise::{_name}", _fake_transfer, lib=_DISK_LIBRARY)

reserve = torch.ops.shardwise.disk_reserve
read = torch.ops.shardwise.disk_read
write = torch.ops.shardwise.disk_write


def opened(file: str) -> ScratchFile | None:
    """The file reserved under a name; None after a dry run."""
    return _OPEN_FILES.get(file)


def wait(file: str, slot: int | None = None) -> None:
    """Wait for the operations of a slot, or for all. Raises ResourceError."""
    if (scratch_file := opened(file)) is not None:
        scratch_file.wait(slot)


def close(file: str) -> None:
    """Close the file and free its disk space."""
    with _LOCK:
        scratch_file = _OPEN_FILES.pop(file, None)
    if scratch_file is not None:
        scratch_file.close()
