"""A stream for copies between device and host, and pinned host buffers that are reused.

One stream serves both directions. Each pass of a step copies in one direction only, so a second stream would gain
nothing. With one stream a buffer can be reused as soon as the copy out of it is queued: the next copy into it comes
later on the same stream.

Allocating pinned memory is slow, so buffers are kept for the life of the run. Their sizes are powers of two, because
PyTorch's pinned allocator rounds up to those. So the ledger counts the allocated size, and one buffer serves
all sizes of its class. The price: a size just above a power of two takes twice its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.offload.host import host_bytes


class CopyStream:
    """The copy stream, and its buffers in host memory."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._module: Any = None
        self._device_stream: Any = None
        self._covered = 0
        self.queued = 0
        """The number of times that copies were queued."""
        self._free: dict[int, list[Tensor]] = {}

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[None]:
        """Queue copies in this block: after all work queued so far, parallel to work queued later."""
        if self._stream is None:
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream()
        self._device_stream = self._module.current_stream()
        self._stream.wait_stream(self._device_stream)
        self.queued += 1
        with self._module.stream(self._stream):
            yield

    def wait_for_copies(self, number: int | None = None) -> None:
        """Make the device's stream wait for the queued copies. The host does not wait.

        Args:
            number: the last copies that matter (``queued`` at that time); None for all. Nothing is done when the
                stream has waited for them before.
        """
        if self._covered >= (self.queued if number is None else number):
            return
        current = self._module.current_stream()
        current.wait_stream(self._stream)
        if current != self._device_stream:  # the stream that owns the memory
            self._device_stream.wait_stream(self._stream)
        self._covered = self.queued

    def take(self, size: int, device: torch.device) -> Tensor:
        """A host buffer of at least ``size`` bytes."""
        # The pinned allocator rounds to powers of two in any case.
        rounded = 1 << (size - 1).bit_length()
        free = self._free.get(rounded)
        return free.pop() if free else host_bytes(rounded, device)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer, once everything that reads it is queued."""
        self._free.setdefault(buffer.numel(), []).append(buffer)
