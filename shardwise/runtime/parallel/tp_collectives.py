"""Collectives of tensor and sequence parallelism, as autograd functions.

Megatron-LM's four collectives (Shoeybi et al. 2019; Korthikanti et al. 2022, arXiv:2205.05198, figures 4 and 5) are
each other's gradients:

    copied    forward: identity;        backward: all-reduce       (f)
    summed    forward: all-reduce;      backward: identity         (f-bar)
    gathered  forward: all-gather;      backward: reduce-scatter   (g), along the sequence
    scattered forward: reduce-scatter;  backward: all-gather       (g-bar), along the sequence

The sequence is the last dim but one. Activations are plain tensors; only weights are DTensors.

Functional collectives return new tensors, so recomputation sees ordinary operations. Refused: DTensor activations,
which decide when to communicate and save gathered tensors for the backward pass; in-place collectives, which
recomputation would have to undo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime.torch_private import functional_collectives

TensorCollective = Callable[[Tensor], Tensor]
"""A collective on one tensor per rank."""


@dataclass(frozen=True)
class TPGroup:
    """The ranks of one tensor-parallel group, and this rank's number."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TPGroup:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def span(self, size: int) -> tuple[int, int]:
        """This rank's part of [0, size), cut like ``torch.chunk``."""
        step = -(-size // self.size)
        return min(self.rank * step, size), min((self.rank + 1) * step, size)

    def all_reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """All-reduce (sum or max) into a new tensor."""
        return _waited(functional_collectives.all_reduce(tensor.contiguous(), how, self.group.group_name))

    def start_all_gather(self, shard: Tensor) -> Tensor:
        """Start an all-gather of equal shards; do not read the result [ranks, ...] before ``finish_all_gather``.

        The output tensor is allocated here. The collective that allocates its own (ALLGATHER_COALESCED) corrupts the
        heap while another one is in progress: gloo's threads write the name of their last work to one string without a
        lock (``lastCompletedWorkName``, torch 2.13), and names over 15 letters are on the heap.
        """
        whole = shard.new_empty(self.size, *shard.shape)
        name = self.group.group_name
        functional_collectives.all_gather_into_tensor_out(
            shard.unsqueeze(0).contiguous(), self.size, name, out=whole
        )
        return whole

    def finish_all_gather(self, sent: Tensor, dim: int = -2) -> Tensor:
        """Wait for ``start_all_gather`` and concatenate along ``dim``; a view if all earlier dims have size 1."""
        return _waited(sent).movedim(0, dim - 1).flatten(dim - 1, dim)

    def all_gather(self, shard: Tensor) -> Tensor:
        """All-gather shards of the sequence."""
        return self.finish_all_gather(self.start_all_gather(shard))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Reduce-scatter along the sequence."""
        # The collective divides the first dim.
        parts = tensor.unflatten(-2, (self.size, -1)).movedim(-3, 0).contiguous()
        name = self.group.group_name
        return _waited(functional_collectives.reduce_scatter_tensor(parts, "sum", self.size, name)).squeeze(0)


def _waited(tensor: Tensor) -> Tensor:
    arrived: Tensor = functional_collectives.wait_tensor(tensor)
    return arrived


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: TensorCollective, back: TensorCollective) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def exchanged(x: Tensor, there: TensorCollective, back: TensorCollective) -> Tensor:
    """``there(x)`` with the gradient ``back(g)``; saves nothing for the backward pass."""
    out: Tensor = _Exchanged.apply(x, there, back)
    return out


def _as_it_is(x: Tensor) -> Tensor:
    return x.view_as(x)  # an autograd function must not return its argument


class _GatheredLastDim(torch.autograd.Function):
    """All-gather of the last dim for a computation that is equal on all ranks; the gradient is this rank's slice."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TPGroup, size: int) -> Tensor:
        ctx.span = ranks.span(size)
        return _whole_last_dim(part, ranks, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start, stop = ctx.span
        return grads[0][..., start:stop].contiguous(), None, None


class _PartOfLastDim(torch.autograd.Function):
    """This rank's slice of the last dim of a tensor that is equal on all ranks; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TPGroup) -> Tensor:
        ctx.ranks = ranks
        ctx.size = whole.shape[-1]
        start, stop = ranks.span(ctx.size)
        return whole[..., start:stop].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _whole_last_dim(grads[0], ctx.ranks, ctx.size), None


def _whole_last_dim(part: Tensor, ranks: TPGroup, size: int) -> Tensor:
    missing = -(-size // ranks.size) - part.shape[-1]
    padded = torch.nn.functional.pad(part, (0, missing)) if missing else part
    whole = ranks.finish_all_gather(ranks.start_all_gather(padded), -1)
    return whole if whole.shape[-1] == size else whole[..., :size].contiguous()


def copied(x: Tensor, ranks: TPGroup) -> Tensor:
    """``x``, equal on all ranks; its gradient is summed over the ranks."""
    return exchanged(x, _as_it_is, ranks.all_reduce)


def summed(x: Tensor, ranks: TPGroup) -> Tensor:
    """The sum of ``x`` over the ranks."""
    return exchanged(x, ranks.all_reduce, _as_it_is)


def gathered(x: Tensor, ranks: TPGroup) -> Tensor:
    """The whole sequence [..., s, h] from the ranks' shards [..., s / ranks, h]."""
    return exchanged(x, ranks.all_gather, ranks.reduce_scatter)


def scattered(x: Tensor, ranks: TPGroup) -> Tensor:
    """This rank's shard [..., s / ranks, h] of the sum of ``x`` [..., s, h] over the ranks."""
    return exchanged(x, ranks.reduce_scatter, ranks.all_gather)


def gathered_last_dim(part: Tensor, ranks: TPGroup, size: int) -> Tensor:
    """[..., size] from the ranks' shards of the last dim, which may be uneven."""
    out: Tensor = _GatheredLastDim.apply(part, ranks, size)
    return out


def part_of_last_dim(whole: Tensor, ranks: TPGroup) -> Tensor:
    """This rank's shard of the last dim, which may be uneven."""
    out: Tensor = _PartOfLastDim.apply(whole, ranks)
    return out
