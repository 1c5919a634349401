"""The global gradient norm, and scaling of gradients.

The norm is one scalar all-reduce over the world. Every rank sums the squares of its shards, divided by the number of
ranks with the same shard, so the code is correct for any mesh. ``clip_grad_norm_`` on DTensors reduces once per mesh
axis and cannot mix parameters of different meshes. The norm is computed in fp32 or wider, for any gradient dtype. There
is no host sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import compress

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.runtime.torch_private import foreach_mul_, foreach_norm, local_tensor


def local(tensor: Tensor) -> Tensor:
    """The local shard of a tensor that may be a DTensor; no copy, no operation."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def shards_of(tensor: Tensor) -> int:
    """Into how many shards a tensor is divided: 1 unless it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return 1
    # A strided shard (two axes on the same dim) is not a Shard in every torch release.
    sharded = [not p.is_replicate() and not p.is_partial() for p in tensor.placements]
    return math.prod(compress(tensor.device_mesh.shape, sharded))


def square_sum(
    parameters: Iterable[nn.Parameter], device: torch.device, ranks_of: Callable[[Tensor], int]
) -> Tensor:
    """This rank's contribution to the squared global norm, a scalar. The sum over all ranks is the squared norm.

    ``ranks_of`` tells how many ranks hold the same shard of a gradient.
    """
    # Grouped, so that one multi-tensor kernel takes the norms of many shards.
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(ranks_of(parameter.grad), []).append(local(parameter.grad))
    pieces = [piece for group in by_copies.values() for piece in group]
    wide = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
    total = torch.zeros((), dtype=wide, device=device)
    # The all-reduce adds up the copies of a shard, so each rank gives a part of its square.
    for copies in sorted(by_copies):
        total += torch.stack(foreach_norm(by_copies[copies], 2, wide)).square().sum() / copies
    return total


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients in place."""
    if pieces := [local(p.grad) for p in parameters if p.grad is not None]:
        # Gradients of offloaded weights are in host memory.
        foreach_mul_(pieces, factor.to(pieces[0].device))
