"""Scratch files: tensors that lie on a disk and pass through memory in pieces, read ahead and written behind.

A file is reserved whole when a run is built, so a disk that is too small says so at once, and it has no name: it is
unlinked as soon as it is open. Nothing is left behind, however the process ends, no other run can take it for its
own, and nothing is mistaken for state that survives: that is what checkpoints are for. The price is that ``ls`` does
not show it (``df`` does, and so does ``/proc/PID/fd``).

Reads and writes are explicit (``preadv``, ``pwritev``) into buffers of the caller's, on a few threads, which let go of
the interpreter meanwhile. Refused: computing on a memory map, whose pages count as the process's memory until the
kernel takes them back, stall the processor one by one, and turn a full disk into a signal. A map serves only to
hand a whole tensor to whoever saves it (``mapped``). Refused too: bypassing the page cache (``O_DIRECT``), which not
every file system offers and which wants rows of whole sectors; the price is a copy in memory. There is no ``fsync``:
what is lost with the machine is lost with the run.

Operations are operators of the dispatcher, so that the dry run, whose tensors are fake, counts bytes on the disk and
bytes to and from it, and touches no file. They return at once; ``wait`` is for all operations of one slot, a number
that the caller chooses.
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
"""Where tensors begin within a file, bytes: a map can begin there."""

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
            self._descriptor = _reserved(folder, max(size, 1))
        except OSError as error:
            raise self._unusable(error, "reserve") from error
        self._map: weakref.ref[mmap.mmap] | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="shardwise-disk")
        self._pending: dict[int, list[Future[None]]] = {}
        self._writes: dict[int, Future[None]] = {}  # by offset: a later read of the same place waits for it

    def submit(self, part: Callable[..., int], tensor: Tensor, offset: int, slot: int) -> None:
        """Read (preadv) or write (pwritev) a contiguous tensor at ``offset``, after what was last written there."""
        before = self._writes.pop(offset, None)
        if before is not None:
            self._result(before)
        view: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
        future = self._threads.submit(_transfer, part, self._descriptor, view, offset)
        self._pending.setdefault(slot, []).append(future)
        if part is os.pwritev:
            self._writes[offset] = future

    def wait(self, slot: int | None = None) -> None:
        """Until the operations of a slot, or all, have ended. Raises ResourceError for the first that failed."""
        for number in [slot] if slot is not None else list(self._pending):
            for future in self._pending.pop(number, ()):
                self._result(future)

    def mapped(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A stretch of the file as a tensor; writing it writes the file."""
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._whole(), dtype=dtype, count=shape.numel(), offset=offset).view(shape)

    def _whole(self) -> mmap.mmap:
        """One map for all tensors, while there are any: each map takes a file descriptor."""
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
            raise self._unusable(error, "read or write") from error

    def _unusable(self, error: OSError, what: str) -> ShardwiseError:
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


def _reserved(folder: Path, size: int) -> int:
    """A descriptor of a new file of so many bytes on the disk, without a name."""
    descriptor, path = tempfile.mkstemp(prefix="shardwise-", dir=folder)
    os.unlink(path)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _transfer(part: Callable[..., int], descriptor: int, view: memoryview, offset: int) -> None:
    """Read or write all of a view: the system may do a part of it at a time."""
    while view:
        count = part(descriptor, [view], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file ends too early")
        view, offset = view[count:], offset + count


# -- the operators ------------------------------------------------------------------------------------

_OPEN: dict[str, ScratchFile] = {}
_LOCK = threading.Lock()

_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")  # lives as long as the process
_LIBRARY.define("disk_reserve(Tensor anchor, str file, str folder, int size) -> ()")
_LIBRARY.define("disk_read(Tensor(a!) into, str file, int offset, int slot) -> ()")
_LIBRARY.define("disk_write(Tensor what, str file, int offset, int slot) -> ()")


def _reserve(anchor: Tensor, file: str, folder: str, size: int) -> None:
    opened = ScratchFile(Path(folder), size)
    with _LOCK:
        _OPEN[file] = opened


def _read(into: Tensor, file: str, offset: int, slot: int) -> None:
    _OPEN[file].submit(os.preadv, into, offset, slot)


def _write(what: Tensor, file: str, offset: int, slot: int) -> None:
    _OPEN[file].submit(os.pwritev, what, offset, slot)


def _nothing(*_: object) -> None:
    """On fake tensors: what would be done is counted by the tracker."""


for _name, _function in {"disk_reserve": _reserve, "disk_read": _read, "disk_write": _write}.items():
    _LIBRARY.impl(_name, _function, "CPU")
    torch.library.register_fake(f"shardwise::{_name}", _nothing, lib=_LIBRARY)

reserve = torch.ops.shardwise.disk_reserve
read = torch.ops.shardwise.disk_read
write = torch.ops.shardwise.disk_write


def opened(file: str) -> ScratchFile | None:
    """The file that was reserved under a name; None where only a dry run did."""
    return _OPEN.get(file)


def wait(file: str, slot: int | None = None) -> None:
    """Until what was begun on a slot, or on all, has ended. Raises ResourceError."""
    if (found := opened(file)) is not None:
        found.wait(slot)


def close(file: str) -> None:
    """Give the space back."""
    with _LOCK:
        found = _OPEN.pop(file, None)
    if found is not None:
        found.close()
