"""Copies beside the device's work: a stream of their own, and buffers in host memory that are used again.

One stream for both ways. The passes of a step copy one way each, so two would gain nothing, and with one a buffer may
be handed on as soon as the copy out of it is queued: the copy into it comes later on the same stream.

Pinned memory is slow to get, so buffers are kept for the life of the run, as many as were ever in use at once. Their
sizes are powers of two, for to these PyTorch's pinned allocator rounds up anyway: asked for so, the ledger says what
is taken, and one buffer serves all sizes of its class. The price is that a size just above a power of two takes twice
its bytes. Refused: registering memory of exact size with the driver, which every kind of device does differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.model.host import host_bytes


class Lanes:
    """The stream beside the device's own, and the host's buffers."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._module: Any = None
        self._device_stream: Any = None
        self._covered = 0
        self.queued = 0
        """The number of the last copies that were queued together."""
        self._free: dict[int, list[Tensor]] = {}

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Queue copies behind what the device has been given so far, and beside what it is given from now on."""
        if self._stream is None:
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream()
        self._device_stream = self._module.current_stream()
        self._stream.wait_stream(self._device_stream)
        self.queued += 1
        with self._module.stream(self._stream):
            yield

    def arrived(self, number: int | None = None) -> None:
        """What the device is given from now on comes after all copies that are queued. The host does not wait.

        Nothing is done where those of ``number`` and all before (None: all) have been waited for already.
        """
        if self._covered >= (self.queued if number is None else number):
            return
        current = self._module.current_stream()
        current.wait_stream(self._stream)
        if current != self._device_stream:  # whose memory is copied from and to
            self._device_stream.wait_stream(self._stream)
        self._covered = self.queued

    def take(self, size: int, device: torch.device) -> Tensor:
        """A buffer in host memory of at least ``size`` bytes."""
        rounded = 1 << (size - 1).bit_length()
        free = self._free.get(rounded)
        return free.pop() if free else host_bytes(rounded, device)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back as soon as everything that reads it is queued."""
        self._free.setdefault(buffer.numel(), []).append(buffer)
