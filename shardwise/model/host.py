"""Host memory beside the device's: where what is offloaded goes, and whether that is another place at all.

Everything that is meant to lie in host memory is allocated inside ``host_memory()``, pinned where the device copies
from it on its own. A run needs no more than that. The dry run, whose tensors are all on the fake CPU, reads from it
which memory an allocation takes, and so counts both memories, and every copy between them, by the code that trains.

On a CPU the device's memory *is* the host's. ``apart`` says so, and whoever offloads then leaves tensors where they
are: a copy would take memory twice to free it once. The dry run answers for the device that is planned for.

A variable of the module, not of a context: autograd may run backward hooks on another thread, and there is one step
at a time in a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_depth = 0
_told: bool | None = None


@contextmanager
def host_memory() -> Iterator[None]:
    """What is allocated in this block lies in host memory."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def in_host_memory() -> bool:
    """Whether a ``host_memory`` block is open."""
    return _depth > 0


@contextmanager
def memories_apart(told: bool) -> Iterator[None]:
    """In this block ``apart`` is what is told, whatever the device: for the dry run, and for tests without one."""
    global _told
    before, _told = _told, told
    try:
        yield
    finally:
        _told = before


def apart(device: torch.device) -> bool:
    """Whether ``device`` has a memory of its own."""
    return device.type != "cpu" if _told is None else _told


def host_empty_like(tensor: Tensor) -> Tensor:
    """Undefined values of a plain tensor's shape and dtype in host memory, pinned for a device of its own memory."""
    with host_memory():
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def host_bytes(size: int, device: torch.device) -> Tensor:
    """``size`` undefined bytes in host memory, pinned where ``device`` has a memory of its own."""
    with host_memory():
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
