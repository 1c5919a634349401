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
from shardwise.runtime.torch_private import distributed_tensor

CHUNK = 2**22
"""Largest number of elements in a chunk: 16 MiB for each tensor in fp32."""

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


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Slices of whole rows with at most CHUNK values, at least one row each."""
    height = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def distributed_as(parameter: Tensor, piece: Tensor, columns: int | None = None) -> Tensor:
    """A local shard as a tensor that is sharded like ``parameter``, with its shape or with ``columns`` columns.

    The shard may be in another memory than the parameter; ``DTensor.from_local`` would move it.
    """
    if not isinstance(parameter, DTensor):
        return piece
    shape, stride = parameter.shape, parameter.stride()
    if columns is not None:
        shape, stride = parameter.shape[:1] + (columns,), (columns, 1)
    return distributed_tensor(piece, parameter, shape, stride)


def stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """An uninitialised host parameter with the same sharding, from which rules create state. It is never written."""
    piece = torch.empty_like(local(parameter.detach()), device="cpu")
    return nn.Parameter(distributed_as(parameter, piece), requires_grad=False)
