"""A piece: some rows of one parameter with its gradient and moments, the unit in which offloaded state is updated.

Every rule here is elementwise, or works in blocks within a row, so rows can be updated by themselves and in any
order. A piece knows its parameter only for where its rows lie in the whole (stochastic rounding asks for that);
the tensors may be copies in another memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.engine.optim.norm import local

CHUNK = 2**22
"""Elements updated at once: 16 MiB for each tensor in fp32."""

STEP = "step"
"""The name of what counts updates: a scalar, which is in memory wherever moments are."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter, [rows, rest] each. ``step`` counts this update already, unless it is skipped."""

    parameter: nn.Parameter
    rows: slice
    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    step: Tensor | None


def as_rows(tensor: Tensor) -> Tensor:
    """The local piece of a tensor as [rows, rest]; a vector is one column, a scalar one value. A view."""
    piece = local(tensor.detach())
    return piece.view(piece.shape[0] if piece.ndim else 1, piece.shape[1:].numel())


def chunks(rows: int, columns: int) -> Iterator[slice]:
    """Spans of whole rows of at most CHUNK values, at least one row each."""
    height = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def distributed_as(parameter: Tensor, piece: Tensor, columns: int | None = None) -> Tensor:
    """A rank's piece as a tensor that is divided as ``parameter`` is, of its shape or of so many ``columns``.

    The piece may lie in another memory than the parameter's: ``DTensor.from_local`` would move it.
    """
    if not isinstance(parameter, DTensor):
        return piece
    shape, stride = parameter.shape, parameter.stride()
    if columns is not None:
        shape, stride = parameter.shape[:1] + (columns,), (columns, 1)
    spec = DTensorSpec(
        parameter.device_mesh, parameter.placements, tensor_meta=TensorMeta(shape, stride, piece.dtype)
    )
    return DTensor(piece, spec, requires_grad=False)


def stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of undefined values on the host, divided alike: for rules to make state there. Never written."""
    piece = torch.empty_like(local(parameter.detach()), device="cpu")
    return nn.Parameter(distributed_as(parameter, piece), requires_grad=False)
