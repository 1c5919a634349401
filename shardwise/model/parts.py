"""Parts of a model: consecutive blocks, with what lies before the first one or after the last one of the model.

A rank of a pipeline builds its parts alone and never the model. Blocks keep their numbers (``layers.7.…``), so seeds,
weight files and checkpoints know nothing of parts. ``Parts`` holds those of one rank, several where a schedule
interleaves them; its children are called ``_part0``, ``_part1``, which ``canonical_name`` removes as it removes a
wrapper. All parts run through ``Parts.forward``, so that whoever hooks a model's root (FSDP2) sees one root.

Where to cut follows from what is computed, counted on fake tensors: the FLOPs of one block, and of what lies after
the last one for the targets of a batch. The head is as dear as several layers of a small model. Blocks are given out
one by one to the part that has least to do, which makes the slowest part as fast as whole blocks allow; of equals the
last takes one, for it has the fewest micro-batches in flight. What lies before the first block looks ids up and has
no products: it counts as nothing. Refused: cutting by parameters, by which an embedding, which is read and not
multiplied, would be as dear as the head; cutting within a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.errors import RecipeError
from shardwise.model.flops import flops_of

if TYPE_CHECKING:
    from shardwise.model.blueprint import Blueprint

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Which blocks of a model, and whether what lies before and after all blocks belongs to it."""

    blocks: range
    first: bool = True
    last: bool = True

    def shortened(self, depth: int | None) -> Part:
        """The same with at most so many blocks, the first ones; None keeps all."""
        return self if depth is None else replace(self, blocks=self.blocks[:depth])


class Parts(nn.Module):
    """The parts of a model that one rank holds, in the order of the model."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            self.add_module(f"_part{index}", part)

    def forward(self, index: int, run: Callable[[nn.Module, Tensor], T], given: Tensor) -> T:
        """What ``run`` makes of part ``index`` and of what that part is given."""
        return run(self.get_submodule(f"_part{index}"), given)


def renumbered(blocks: nn.ModuleList, start: int) -> nn.ModuleList:
    """The same list with names that count from ``start``. It can be iterated over and cut, not indexed."""
    modules = list(blocks._modules.items())
    for name, _ in modules:
        del blocks._modules[name]
    for name, block in modules:
        blocks._modules[str(int(name) + start)] = block
    return blocks


@dataclass(frozen=True)
class Costs:
    """FLOPs of the forward pass of one sequence: through one block, and through all that is not a block."""

    block: int
    rest: int


@functools.lru_cache(maxsize=8)
def costs_of(blueprint: Blueprint, sequence_length: int) -> Costs:
    """Counted on two models that differ by a block. For blueprints whose depth can be varied."""
    one, two = (_forward_flops(blueprint, sequence_length, depth) for depth in (1, 2))
    return Costs(two - one, 2 * one - two)


def _forward_flops(blueprint: Blueprint, sequence_length: int, depth: int) -> int:
    counter = _Counter()
    with torch.no_grad(), FakeTensorMode():
        model = blueprint.build(depth)
        shapes = blueprint.sample_shapes(sequence_length)
        batch = {name: torch.zeros((1, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
        with counter:
            blueprint.loss(model, batch)
    return counter.flops


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out


def blocks_per_part(blocks: int, parts: int, costs: Costs) -> list[int]:
    """How many of the blocks each part takes; at least one."""
    counts = [1] * parts
    for _ in range(blocks - parts):
        seconds = [
            count * costs.block + (costs.rest if i == parts - 1 else 0) for i, count in enumerate(counts)
        ]
        counts[max(range(parts), key=lambda i: (-seconds[i], i))] += 1
    return counts


def cut(blueprint: Blueprint, parts: int, sequence_length: int) -> list[Part]:
    """The model in ``parts`` parts of about equal cost.

    Raises RecipeError for a model with fewer blocks, or whose blocks are not known to be alike.
    """
    if blueprint.depth is None or blueprint.width is None:
        blueprint.part(Part(range(0)))  # which says why not
    if blueprint.depth is None or blueprint.depth < parts:
        raise RecipeError(
            f"{blueprint.name} cannot be cut into {parts} stages",
            where="strategy.pipeline_parallel",
            why=f"every stage needs a block of the model, which has {blueprint.depth}",
            fix="lower pipeline_parallel or pipeline_stages_per_rank",
        )
    counts = blocks_per_part(blueprint.depth, parts, costs_of(blueprint, sequence_length))
    starts = [sum(counts[:index]) for index in range(parts)]
    return [
        Part(range(start, start + count), start == 0, start + count == blueprint.depth)
        for start, count in zip(starts, counts, strict=True)
    ]
