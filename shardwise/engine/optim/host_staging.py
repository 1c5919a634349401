"""Staging buffers in host memory for weights and gradients, and the copies in and out.

While the CPU updates one chunk, the next chunk's weights and gradient are copied from the device, and the last chunk's
weights are copied back. Each direction has its own stream, so both directions of the link are in use. The host waits
only for the copies of one chunk. There are ``SLOTS`` pinned buffers of the largest chunk's size, for any model size.

Weights are copied in both directions. A second copy of them on the host would save one direction (4 bytes per parameter
over a link that is faster than host memory), but cost 4 bytes per parameter of host memory, and need a rule for which
copy is current when a checkpoint or a snapshot is restored.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardwise.hardware.kinds import kind_of
from shardwise.runtime.offload.host import host_bytes

SLOTS = 3
"""Chunks in flight: one copied in, one updated, one copied out."""


def carve(buffer: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor view of a byte buffer from ``start``."""
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Staging:
    """``SLOTS`` buffers for a chunk's weights and gradient, of ``largest`` bytes each."""

    def __init__(self, device: torch.device, largest: int) -> None:
        streams = not kind_of(device).is_host
        self._weights = [host_bytes(largest, device) for _ in range(SLOTS)]
        self._grads = [host_bytes(largest, device) for _ in range(SLOTS)]
        self._device = device
        self._down = torch.Stream(device) if streams else None
        self._up = torch.Stream(device) if streams else None
        # By slot: the ends of its last copies in and out. None on the CPU, where a copy is over when it returns.
        self._copied_in: list[torch.Event | None] = [None] * SLOTS
        self._copied_out: list[torch.Event | None] = [None] * SLOTS

    def begin(self) -> None:
        """Make later fetches wait for the kernels issued so far."""
        if self._down is not None:
            self._down.wait_stream(torch.accelerator.current_stream(self._device))

    def fetch(self, slot: int, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Start to copy a chunk to the host; the result is valid after ``wait``."""
        buffers = (
            carve(self._weights[slot], 0, weight.shape, weight.dtype),
            carve(self._grads[slot], 0, grad.shape, grad.dtype),
        )
        copied_out = self._copied_out[slot]
        # The last chunk of this slot may still be on its way back. The stream waits for that, not the host.
        if self._down is not None and copied_out is not None:
            self._down.wait_event(copied_out)
        with _on_stream(self._down):
            buffers[0].copy_(weight, non_blocking=True)
            buffers[1].copy_(grad, non_blocking=True)
        self._copied_in[slot] = self._down.record_event() if self._down is not None else None
        return buffers

    def wait(self, slot: int) -> None:
        """Wait until the last fetch into a slot is complete. The host waits nowhere else."""
        # The CPU computes on the buffers, so the host has to wait, but for this copy only.
        if (copied_in := self._copied_in[slot]) is not None:
            copied_in.synchronize()

    def send(self, slot: int, buffer: Tensor, weight: Tensor) -> None:
        """Start to copy updated weights back."""
        with _on_stream(self._up):
            weight.copy_(buffer, non_blocking=True)
        self._copied_out[slot] = self._up.record_event() if self._up is not None else None

    def end(self) -> None:
        """Make later kernels wait for all sends."""
        if self._up is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._up)


def _on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else stream
