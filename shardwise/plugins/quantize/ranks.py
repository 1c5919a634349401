"""The ranks of a pass: each has a part of the sequences, and quantizes a part of the layers of every block.

Blocks are sequential, so all ranks work on the same block. Sums over calibration tokens are all-reduced. Each layer's
quantized weight is broadcast by the rank that made it. Every rank reads the block from disk by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.plugins.quantize.statistics import InputSums

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a pass."""

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls) -> Ranks:
        """Those of the default process group; one without it."""
        joined = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if joined else cls()

    def part(self, items: Sequence[T]) -> list[T]:
        """Every ``size``-th item, from this rank's on."""
        return list(items[self.rank :: self.size])

    def add(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        maximum = torch.tensor(number)
        if self.size > 1:
            dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return int(maximum)

    def sum_inputs(self, groups: Sequence[InputSums]) -> None:
        """Replace sums over this rank's tokens by those over all. Raises RecipeError if ranks have other groups."""
        if self.size == 1:
            return
        # A rank whose tokens reach other layers has other groups, and the all-reduces below would hang or mix them.
        by_rank: list[list[list[str]]] = [[] for _ in range(self.size)]
        dist.all_gather_object(by_rank, [group.layers for group in groups])
        if any(layers != by_rank[0] for layers in by_rank):
            raise RecipeError(
                "a layer has calibration tokens on some ranks only",
                where="--sequences",
                fix="give more, or quantize in one process",
            )
        for group in groups:
            assert group.hessian is not None and group.magnitude is not None
            self.add(group.hessian)
            self.add(group.magnitude)
            group.tokens = int(self.add(torch.tensor(group.tokens)))

    def exchanged(self, names: Sequence[str], own: Mapping[str, T]) -> dict[str, T]:
        """The results for all names, in order; ``own`` are those of ``part(names)``."""
        results: dict[str, T] = {}
        for position, name in enumerate(names):
            result = [own.get(name)]
            if self.size > 1:  # from the rank whose ``part`` has this position
                dist.broadcast_object_list(result, src=position % self.size)
            assert result[0] is not None
            results[name] = result[0]
        return results


ALONE = Ranks()
