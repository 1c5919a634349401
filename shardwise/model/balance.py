"""Load balancing of pipeline stages: assigns blocks to stages by forward FLOPs.

FLOPs are counted on fake tensors. The output layer of a small model costs as much as several blocks; the embedding is
a lookup and costs nothing. Each block goes to the stage with the fewest FLOPs, so the slowest stage is as fast as
whole blocks allow. Of equal stages, the last one has the fewest micro-batches in flight and takes the block. Blocks
that are not alike are counted one by one, and cut where the costliest stage costs least.

Refused: balancing by parameters, which makes an embedding as expensive as the output layer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Blueprint
from shardwise.model.stage import Stage
from shardwise.runtime.flops import FlopCounter
from shardwise.runtime.torch_private import NEEDS_VALUES
from shardwise.runtime.torch_private_fake import StaticFakeMode


@dataclass(frozen=True)
class Costs:
    """Forward FLOPs of one sequence: in one block, and in all layers outside the blocks."""

    block: int
    rest: int


@functools.lru_cache(maxsize=8)
def costs_of(blueprint: Blueprint, sequence_length: int) -> Costs:
    """Count a model of two blocks. The blueprint's depth must not be None."""
    first, second, end = _forward_flops(blueprint, sequence_length, depth=2)
    block = second - first  # FLOPs before each block are counted, so the difference is one block alone
    return Costs(block, end - 2 * block)


def _forward_flops(blueprint: Blueprint, sequence_length: int, depth: int | None = None) -> list[int]:
    """FLOPs before each block, and those of the whole pass."""
    counter = FlopCounter()
    with torch.device("meta"):
        model = blueprint.build(depth)
    with torch.no_grad(), StaticFakeMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        shapes = blueprint.sample_shapes(sequence_length)
        batch = {name: torch.zeros((1, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
        before: list[int] = []
        for block in blueprint.blocks(model):
            block.register_forward_pre_hook(lambda *_: before.append(counter.flops))
        try:
            with counter:
                blueprint.loss(model, batch)
        except NEEDS_VALUES as error:
            raise RecipeError(
                f"{blueprint.name} cannot be cut into stages",
                where="strategy.pipeline_parallel",
                why=f"its blocks are not counted without values ({error})",
                fix="set it to 1",
            ) from error
    return [*before, counter.flops]


def balanced_blocks(costs: Sequence[int], stages: int) -> list[int]:
    """Numbers of consecutive blocks, at least one each, whose costliest stage costs least.

    Args:
        costs: of each block, in order; the last one's includes what comes after it.
    """
    # Dynamic programming: the best cut of the first blocks into n stages extends a best cut into n - 1.
    ends = list(itertools.accumulate(costs, initial=0))
    best = {(0, 0): (0, 0)}  # (blocks, stages): (cost of the costliest, blocks before the last stage)
    for count in range(1, stages + 1):
        # Each of the other stages needs a block, so this many blocks are left for the first ``count``.
        for blocks in range(count, len(costs) - stages + count + 1):
            best[blocks, count] = min(
                (max(best[start, count - 1][0], ends[blocks] - ends[start]), start)
                for start in range(count - 1, blocks)
                if (start, count - 1) in best
            )
    # The last stage's first block says where the stage before it ends.
    counts = []
    left = len(costs)
    for count in range(stages, 0, -1):
        start = best[left, count][1]
        counts.append(left - start)
        left = start
    return counts[::-1]


@functools.lru_cache(maxsize=8)
def _costs_of_unlike(blueprint: Blueprint, sequence_length: int) -> tuple[int, ...]:
    """Forward FLOPs of each block; of the last one with those after it."""
    before = _forward_flops(blueprint, sequence_length)
    return tuple(after - start for start, after in itertools.pairwise(before))


def blocks_per_stage(blocks: int, stages: int, costs: Costs) -> list[int]:
    """Number of blocks of each stage, at least one."""
    counts = [1] * stages
    for _ in range(blocks - stages):
        flops = [count * costs.block for count in counts]
        flops[-1] += costs.rest  # the output layer, since the embedding costs nothing
        # The fewest FLOPs; of equal stages the last one.
        counts[max(range(stages), key=lambda i: (-flops[i], i))] += 1
    return counts


def balanced_stages(blueprint: Blueprint, count: int, sequence_length: int) -> list[Stage]:
    """Cut the model into ``count`` stages of about equal cost.

    Raises RecipeError if the model has fewer blocks, or does not say how it is cut.
    """
    kinds = blueprint.block_kinds
    depth = blueprint.depth
    if depth is None and kinds is not None:
        depth = len(kinds)
    if depth is None or blueprint.width is None:
        blueprint.stage(Stage(range(0)))  # raises with the model's own reason
    if depth is None or depth < count:
        raise RecipeError(
            f"{blueprint.name} cannot be cut into {count} stages",
            where="strategy.pipeline_parallel",
            why=f"every stage needs a block of the model, which has {depth}",
            fix="lower pipeline_parallel or pipeline_stages_per_rank",
        )
    if blueprint.depth is not None:
        counts = blocks_per_stage(depth, count, costs_of(blueprint, sequence_length))
    else:
        counts = balanced_blocks(_costs_of_unlike(blueprint, sequence_length), count)
    starts = [sum(counts[:index]) for index in range(count)]
    return [
        Stage(range(start, start + blocks), start == 0, start + blocks == depth)
        for start, blocks in zip(starts, counts, strict=True)
    ]


def kinds_of(blueprint: Blueprint, stages: Sequence[Stage]) -> tuple[object, ...]:
    """What the blocks of each stage are, where they are not all alike."""
    kinds = blueprint.block_kinds
    if blueprint.depth is not None or kinds is None:
        return ()
    return tuple(kinds[stage.blocks.start : stage.blocks.stop] for stage in stages)
