"""The global norm of the gradient, and scaling by it.

The norm is one scalar all-reduce over the world: every rank sums the squares of what it holds, divided by how many
ranks hold the same piece, so the same code is right for any mesh. ``clip_grad_norm_`` on DTensors reduces once per mesh
axis and cannot mix parameters of different meshes. It is taken in fp32 or wider, whatever gradients are stored
in. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The piece of a possibly distributed tensor that this rank holds; no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holders(tensor: Tensor, ranks: int) -> int:
    """How many of ``ranks`` ranks, which share out or copy the same tensors, hold the same piece of this one."""
    if not isinstance(tensor, DTensor):
        return ranks
    pieces = 1
    for dim, placement in enumerate(tensor.placements):
        # Strided shards, of two axes that cut the same dim, are no Shard in every release of torch.
        if not placement.is_replicate() and not placement.is_partial():
            pieces *= tensor.device_mesh.size(dim)
    return ranks // pieces


def gradient(parameter: nn.Parameter) -> Tensor:
    """The piece of a parameter's gradient that this rank holds; there must be one."""
    assert parameter.grad is not None
    return local(parameter.grad)


def square_sum(parameters: Iterable[nn.Parameter], device: torch.device, ranks: int) -> Tensor:
    """This rank's share of the squared global norm, a scalar: shares of all ranks of the world sum to it.

    ``ranks`` is how many of them share out or copy these very parameters.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(holders(parameter.grad, ranks), []).append(gradient(parameter))
    pieces = [piece for group in by_copies.values() for piece in group]
    wide = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
    total = torch.zeros((), dtype=wide, device=device)
    for copies in sorted(by_copies):
        total += torch.stack(torch._foreach_norm(by_copies[copies], 2, wide)).square().sum() / copies
    return total


def global_norm(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    ranks: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The L2 norm of the gradients of a group of ranks (None: of all), a scalar on the device, equal on them."""
    square = square_sum(parameters, device, ranks)
    dist.all_reduce(square, group=group)
    return square.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients in place."""
    if pieces := [gradient(p) for p in parameters if p.grad is not None]:
        torch._foreach_mul_(pieces, factor.to(pieces[0].device))
