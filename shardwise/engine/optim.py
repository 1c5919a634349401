"""The optimizer, its parameter groups, and clipping by the global norm.

Chosen: torch's fused AdamW over the (sharded) parameters; it allocates nothing beside its two moments,
where the foreach form holds one more copy of all parameters during the step. Matrices decay; norms, biases
and other vectors do not.

The global norm is one scalar all-reduce: every rank sums the squares of what it holds, divided by how many
ranks hold the same piece, so the same code is right for any mesh. ``clip_grad_norm_`` on DTensors reduces
once per mesh axis and cannot mix parameters of different meshes. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.core.recipe import OptimizerSpec


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters of a materialised model (Loshchilov & Hutter 2019)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.epsilon,
        fused=True,
    )


def local(tensor: Tensor) -> Tensor:
    """The piece of a possibly distributed tensor that this rank holds; no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holders(tensor: Tensor, world_size: int) -> int:
    """How many ranks hold the same piece of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return world_size
    pieces = 1
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            pieces *= tensor.device_mesh.size(dim)
    return world_size // pieces


def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale all gradients in place so that their global L2 norm is at most ``max_norm``.

    Returns the norm before clipping, a scalar on the device that is equal on all ranks. ``max_norm`` None
    only measures.
    """
    world_size = dist.get_world_size()
    gradients = [p.grad for p in parameters if p.grad is not None]
    pieces = [local(g) for g in gradients]
    square = torch.zeros((), dtype=pieces[0].dtype, device=pieces[0].device)
    for copies in sorted({holders(g, world_size) for g in gradients}):
        group = [
            piece for g, piece in zip(gradients, pieces, strict=True) if holders(g, world_size) == copies
        ]
        square += torch.stack(torch._foreach_norm(group)).square().sum() / copies
    dist.all_reduce(square)
    norm = square.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(pieces, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
