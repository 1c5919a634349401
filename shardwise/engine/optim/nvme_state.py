"""Moments in a file (NVMe offload): they pass through a few buffers, row by row.

The file holds one moment after the other, each contiguous, so a checkpoint can map it whole. A chunk takes the same
rows of each. There are SLOTS buffers of the largest chunk's size, for any model size. Step counts stay in memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from shardwise.engine.optim.chunk import STEP, as_rows, copied_rows, distributed_as, stand_in
from shardwise.engine.optim.host_staging import SLOTS, carve
from shardwise.engine.optim.norm import local
from shardwise.engine.optim.optimizer import UpdateRule
from shardwise.runtime.offload import disk

_numbers = count()  # a process may have several state files: each gets a name of its own
_BUFFER_ALIGNMENT = 64
"""Bytes. Tensors of any dtype may begin at such an offset of a slot's buffer."""


@dataclass(frozen=True)
class Region:
    """One moment of one parameter: its offset in the file, its local shape, and its shape as rows."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    rows: int
    columns: int
    last_dims: int | None

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


class StateFile:
    """The moments of some parameters in one scratch file of a folder. ``counts`` stay in memory."""

    def __init__(self, folder: str, rule: UpdateRule, parameters: Sequence[nn.Parameter]) -> None:
        self._name = f"state-{next(_numbers)}"
        self._regions: dict[nn.Parameter, dict[str, Region]] = {}
        self.counts: dict[nn.Parameter, dict[str, Tensor]] = {}
        end = 0  # bytes of the file so far
        largest = 0  # bytes of a buffer
        for parameter in parameters:
            # The state of one parameter at a time is in memory, for its shapes and dtypes alone.
            state = rule.state(stand_in(parameter))
            regions: dict[str, Region] = {}
            self.counts[parameter] = {STEP: state.pop(STEP)} if STEP in state else {}
            for name, tensor in state.items():
                regions[name] = region = _region(end, tensor, parameter)
                # Each moment begins where a memory map can begin: a checkpoint maps it.
                end += -(-region.bytes // disk.ALIGNMENT) * disk.ALIGNMENT
            self._regions[parameter] = regions
            spans = copied_rows(as_rows(parameter))
            largest = max([largest, *(_room(regions, span) for span in spans)])
        # Written at once, because a page takes memory only after its first write, and any slot may get the largest
        # chunk.
        self._buffers = [torch.zeros(largest, dtype=torch.uint8) for _ in range(SLOTS)]
        disk.reserve(self._buffers[0], self._name, folder, end)
        weakref.finalize(self, disk.close, self._name)
        for parameter in parameters:
            self._write_fresh(parameter, rule)

    def _write_fresh(self, parameter: nn.Parameter, rule: UpdateRule) -> None:
        """Write initial codes. Floating point moments start at zero, and a reserved file reads as zeros."""
        regions = {n: r for n, r in self._regions[parameter].items() if not r.dtype.is_floating_point}
        state = rule.state(stand_in(parameter)) if regions else {}
        for name, region in regions.items():
            disk.write(local(state[name]), self._name, region.offset, 0)
        disk.wait(self._name)

    def fetch(self, slot: int, parameter: nn.Parameter, rows: slice) -> dict[str, Tensor]:
        """Start to read rows into a slot's buffer, after its last write; the result is valid after ``wait``."""
        self.wait(slot)
        state: dict[str, Tensor] = {}
        start = 0  # in the slot's buffer, which the moments of a chunk share
        for name, region in self._regions[parameter].items():
            shape = torch.Size((rows.stop - rows.start, region.columns))
            state[name] = carve(self._buffers[slot], start, shape, region.dtype)
            disk.read(state[name], self._name, region.offset + rows.start * region.row_bytes, slot)
            start += _rounded_up(state[name].nbytes)
        return state

    def wait(self, slot: int) -> None:
        disk.wait(self._name, slot)

    def send(self, slot: int, state: dict[str, Tensor], parameter: nn.Parameter, rows: slice) -> None:
        """Start to write updated rows back."""
        for name, region in self._regions[parameter].items():
            disk.write(state[name], self._name, region.offset + rows.start * region.row_bytes, slot)

    def mapped(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A parameter's moments as maps of the file, after all writes; {} in a dry run."""
        disk.wait(self._name)
        file = disk.opened(self._name)
        if file is None:
            return {}
        return {
            name: distributed_as(
                parameter, file.mapped(region.offset, region.shape, region.dtype), region.last_dims
            )
            for name, region in self._regions[parameter].items()
        }


def _region(offset: int, tensor: Tensor, parameter: nn.Parameter) -> Region:
    rows = as_rows(tensor)
    # Scales of 8-bit moments have one column for each block of columns of the parameter.
    columns = None if tensor.shape == parameter.shape else tensor.shape[1]
    return Region(offset, local(tensor).shape, tensor.dtype, rows.shape[0], rows.shape[1], columns)


def _room(regions: dict[str, Region], rows: slice) -> int:
    """Bytes of a buffer for ``rows`` of all moments."""
    return sum(_rounded_up((rows.stop - rows.start) * region.row_bytes) for region in regions.values())


def _rounded_up(size: int) -> int:
    return -(-size // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
