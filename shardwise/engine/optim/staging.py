"""Buffers in host memory through which weights and gradients pass, and the copies that fill and empty them.

While the processor updates one piece, the next one's weights and gradient come from the device and the last one's
weights go back, each way on a stream of its own, so both directions of the link are in use. The host waits for
the copies of one piece, never for the device. Buffers are pinned, ``SLOTS`` of them, as large as the largest
piece, whatever the model's size.

Weights travel down as well as up. Refused: a second copy of them on the host, which would save the way down (4 bytes
a parameter of a way that the processor's memory is slower than) and cost 4 bytes a parameter there, for good, and
a rule for which copy holds when a checkpoint or a snapshot is written back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardwise.model.host import host_bytes

SLOTS = 3
"""Pieces under way: one that comes, one that is updated, one that goes."""


def carve(buffer: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor in a buffer of bytes from ``start``."""
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Staging:
    """``SLOTS`` places for a piece's weights and gradient. ``largest`` is the bytes of each."""

    def __init__(self, device: torch.device, largest: int) -> None:
        streams = device.type != "cpu"
        self._weights = [host_bytes(largest, device) for _ in range(SLOTS)]
        self._grads = [host_bytes(largest, device) for _ in range(SLOTS)]
        self._device = device
        self._down = torch.Stream(device) if streams else None
        self._up = torch.Stream(device) if streams else None
        self._came: list[torch.Event | None] = [None] * SLOTS
        self._went: list[torch.Event | None] = [None] * SLOTS

    def begin(self) -> None:
        """What the device has been given so far comes before what is fetched from here on."""
        if self._down is not None:
            self._down.wait_stream(torch.accelerator.current_stream(self._device))

    def fetch(self, slot: int, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Begin to copy a piece to the host; valid after ``wait``."""
        held = (
            carve(self._weights[slot], 0, weight.shape, weight.dtype),
            carve(self._grads[slot], 0, grad.shape, grad.dtype),
        )
        went = self._went[slot]
        if self._down is not None and went is not None:
            self._down.wait_event(went)
        with _on(self._down):
            held[0].copy_(weight, non_blocking=True)
            held[1].copy_(grad, non_blocking=True)
        self._came[slot] = self._down.record_event() if self._down is not None else None
        return held

    def wait(self, slot: int) -> None:
        """Until what was fetched last into a slot is there: the one place where the host waits."""
        if (came := self._came[slot]) is not None:
            came.synchronize()

    def send(self, slot: int, held: Tensor, weight: Tensor) -> None:
        """Begin to copy updated weights back."""
        with _on(self._up):
            weight.copy_(held, non_blocking=True)
        self._went[slot] = self._up.record_event() if self._up is not None else None

    def end(self) -> None:
        """What the device is given from here on comes after all that was sent."""
        if self._up is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._up)


def _on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else stream
