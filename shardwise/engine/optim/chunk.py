"""A chunk: one parameter or some of its rows, with gradient and state, as an update rule sees it.

Every rule is elementwise, or works in blocks within a row, so rows can be updated separately and in any order. A chunk
knows its parameter only for the position of its rows in the whole, which stochastic rounding needs. Its tensors are
local: shards of DTensors, or copies of rows in another memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.optim.norm import local
from shardwise.runtime.offload.host import has_separate_host_memory, in_host_memory
from shardwise.runtime.torch_private import distributed_tensor

CHUNK = 2**24
"""Elements that are copied to the CPU at once, or that an accelerator widens at once: 64 MiB in fp32.

With a quarter of it, launches of an accelerator take longer than their kernels.
"""

HOST_CHUNK = 2**22
"""Elements that the CPU widens at once: 16 MiB in fp32, which glibc keeps. It maps 32 MiB anew at each use."""

STEP = "step"
"""Name of the update counter in a state: a scalar, always in memory. A rule that has one counts it up."""


@dataclass(frozen=True)
class Chunk:
    """A whole local shard, with its own shape, or rows of it from row ``first``, as [rows, rest]."""

    parameter: nn.Parameter
    first: int
    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]

    @property
    def rows(self) -> slice:
        """Its rows in the local shard."""
        return slice(self.first, self.first + self.weight.shape[0])


def whole(parameter: nn.Parameter, state: dict[str, Tensor]) -> Chunk:
    """The local shard of a parameter with a gradient."""
    assert parameter.grad is not None
    local_state = {name: local(tensor) for name, tensor in state.items()}
    return Chunk(parameter, 0, local(parameter.detach()), local(parameter.grad), local_state)


def as_rows(tensor: Tensor) -> Tensor:
    """The local shard of a tensor as a view [rows, rest]; a vector is one column, a scalar one value."""
    piece = local(tensor.detach())
    return piece.view(piece.shape[0] if piece.ndim else 1, piece.shape[1:].numel())


def copied_rows(view: Tensor) -> Iterator[slice]:
    """Rows of a view [rows, rest] that are copied to the CPU at once."""
    return _row_slices(view, CHUNK)


def widened_rows(view: Tensor) -> Iterator[slice]:
    """Rows of a view [rows, rest] that a rule widens at once."""
    on_host = in_host_memory() or not has_separate_host_memory(view.device)
    return _row_slices(view, HOST_CHUNK if on_host else CHUNK)


def _row_slices(view: Tensor, elements: int) -> Iterator[slice]:
    """Slices of whole rows with at most ``elements`` values, at least one row each."""
    rows, columns = view.shape
    height = max(1, elements // max(1, columns))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def distributed_as(parameter: Tensor, piece: Tensor, columns: int | None = None) -> Tensor:
    """A local shard as a tensor that is sharded like ``parameter``, with its shape or with ``columns`` columns.

    The shard may be in another memory than the parameter; ``DTensor.from_local`` would move it.
    """
    if not isinstance(parameter, DTensor):
        return piece
    shape = parameter.shape
    stride = parameter.stride()
    if columns is not None:
        shape = parameter.shape[:1] + (columns,)
        stride = (columns, 1)
    return distributed_tensor(piece, parameter, shape, stride)


def stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """An uninitialised host parameter with the same sharding, from which rules create state. It is never written."""
    piece = torch.empty_like(local(parameter.detach()), device="cpu")
    return nn.Parameter(distributed_as(parameter, piece), requires_grad=False)
