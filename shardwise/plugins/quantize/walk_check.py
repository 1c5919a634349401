"""Checks before quantization that a model computes the same block by block (walk.py) as in one forward pass.

Two small batches are run both ways, and a model whose logits differ is refused. The walk takes blocks that are called
once each, and pass hidden states [b, s, h] and nothing else. A block may also read the embedding, what another block
left, or run twice; then the walk fails or has other logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shardwise.core.errors import RecipeError, ShardwiseError, one_line
from shardwise.core.units import format_percent
from shardwise.model.blueprint import Blueprint
from shardwise.model.merging import ReadTensor
from shardwise.model.streaming import streamed_logits
from shardwise.plugins.quantize.walk import Walk

WALK_TOLERANCE = 1e-3
"""Of the logits' norm. The two are the same operations on the same values."""
CHECKED_BLOCKS = 2
"""Blocks that stand for all others if all are alike."""
CHECKED_LENGTH = 8
"""Tokens of a sequence."""


@torch.no_grad()
def require_walk(blueprint: Blueprint, read: ReadTensor, length: int, dtype: torch.dtype) -> None:
    """Raise RecipeError if the blocks of a model cannot be run one by one.

    Args:
        read: reads the tensors by canonical name. length: the most tokens of a sequence.
    """
    checked = blueprint
    if blueprint.depth is not None and blueprint.depth > CHECKED_BLOCKS:
        checked = copy.copy(blueprint)
        checked.build = partial(blueprint.build, CHECKED_BLOCKS)  # type: ignore[method-assign]
    vocab = blueprint.vocab or 1
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(vocab, (1, min(CHECKED_LENGTH, length)), generator=draw) for _ in range(2)]
    with walking(blueprint):
        # Two batches: the walk must not give the second one what the first one left.
        walked = torch.cat(_walked(Walk(checked, read, dtype), batches)).double()
        whole = torch.cat([streamed_logits(checked, read, ids, dtype) for ids in batches]).double()
    difference = float((walked - whole).norm() / whole.norm().clamp(min=1e-30))
    if not difference <= WALK_TOLERANCE:  # also for NaN
        raise _cannot_walk(
            blueprint, f"so run, its logits differ by {format_percent(difference, 1)} from the model's"
        )


@contextmanager
def walking(blueprint: Blueprint) -> Iterator[None]:
    """Raise RecipeError for any error of the model's own code within the block."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise _cannot_walk(blueprint, f"{type(error).__name__}: {one_line(str(error))}") from error


def _walked(walk: Walk, batches: list[Tensor]) -> list[Tensor]:
    """The logits of each batch by the walk."""
    states = list(walk.embedded(batches))
    for index in range(walk.depth):
        with walk.loaded(index, states[0]) as run:
            states = [run(hidden) for hidden in states]
    with walk.head() as head:
        return [head(hidden) for hidden in states]


def _cannot_walk(blueprint: Blueprint, why: str) -> RecipeError:
    return RecipeError(
        "the blocks of this model cannot be run one by one",
        where=f"model: {blueprint.name}",
        why=why,
        fix="take a model whose blocks pass hidden states and nothing else",
    )
