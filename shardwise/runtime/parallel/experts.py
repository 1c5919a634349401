"""Experts of a mixture, divided over the ranks of a tensor-parallel group.

    rank r holds the experts of its span, whole: the first dim of every weight of an experts module
    x [t, h], index [t, k], weight [t, k]: equal on all ranks; each computes its own experts' part of the output
    out [t, h] = sum over ranks

Index entries of other ranks' experts become the number of the rank's experts, which the modules leave out ("expert
parallelism" in transformers), and their routing weight becomes 0. The gradients of ``x`` and of the routing weights are
all-reduced, so the router's gradient is whole on every rank. No token is sent: ranks read the same ones. With shares of
the sequence, tokens and choices are all-gathered, and the sums reduce-scattered.

Refused: a share of every expert's width (``packed_colwise`` in transformers' plans). It shards gate and up
projections, which are one matrix, by strides that no file and no other axis has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.runtime.parallel.shard_slices import local_part
from shardwise.runtime.parallel.tp_collectives import TPGroup, copied, gathered, scattered, summed

ARGUMENTS = 3
"""Of an experts module: tokens [t, h], indices of the chosen experts [t, k], and their weights [t, k]."""


def require_arguments(module: nn.Module, args: tuple[Any, ...], setting: str) -> None:
    """Raise RecipeError unless an experts module is called with ARGUMENTS positional arguments."""
    if len(args) != ARGUMENTS:
        raise RecipeError(
            f"the experts of {type(module).__name__} cannot be divided",
            where=f"strategy.{setting}",
            why="they are not called with tokens, indices and routing weights",
            fix=f"the nearest that works is {setting}: 1",
        )


def divisible_experts(module: nn.Module) -> bool:
    """Whether this is an experts module whose own weights all have one entry per expert."""
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    known = hasattr(module, "_is_expert_parallel") and bool(own)
    nested = sum(1 for _ in module.parameters()) > len(own)
    return known and not nested and all(local_part(weight).shape[0] == count for weight in own)


@dataclass(eq=False)
class DividedExperts:
    """Hooks of an experts module whose weights are sharded: before it runs, and after. This rank has some of them."""

    ranks: TPGroup
    start: int
    stop: int
    sequence_parallel: bool

    @classmethod
    def of(cls, module: nn.Module, ranks: TPGroup, sequence_parallel: bool) -> DividedExperts:
        """Those of a module, which is told that it has fewer experts."""
        experts: Any = module
        start, stop = ranks.span(experts.num_experts)
        experts.num_experts = stop - start
        experts._is_expert_parallel = True
        return cls(ranks, start, stop, sequence_parallel)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        require_arguments(module, args, "tensor_parallel")
        x, index, weight = args
        if self.sequence_parallel:
            index = self.ranks.all_gather(index)
        entered = gathered if self.sequence_parallel else copied
        elsewhere = (index < self.start) | (index >= self.stop)
        # transformers takes the index num_experts for the experts of other ranks.
        here = (index - self.start).masked_fill(elsewhere, self.stop - self.start)
        own = entered(weight, self.ranks).masked_fill(elsewhere, 0.0)
        return entered(x, self.ranks), here, own

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return (scattered if self.sequence_parallel else summed)(result, self.ranks)


@dataclass(eq=False)
class SummedTail:
    """All-reduces the gradient of a replicated layer's last outputs, which only parts of the heads read.

    Of the keys' rotary part in multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): all heads share it and
    each rank has some. Its other outputs go to a column layer, whose input's gradient is whole.
    """

    ranks: TPGroup
    size: int

    def after(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        whole, shared = result.split([result.shape[-1] - self.size, self.size], dim=-1)
        return torch.cat([whole, copied(shared, self.ranks)], dim=-1)
