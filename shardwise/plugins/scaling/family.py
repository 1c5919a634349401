"""A family of decoder sizes: depth, heads and feed-forward size that go with a width, as published models have them.

Loss depends on depth and width mostly through their product (Kaplan et al. 2020, arXiv 2001.08361, figure 5), so a
family needs one shape for each size. The aspect ratio, width / layers, grows with the width as it does in GPT-3 (Brown
et al. 2020, arXiv 2005.14165, table 2.1) and Llama (arXiv 2302.13971, table 2; arXiv 2407.21783, table 3). Vocabulary,
context, attention groups and the shape of the feed-forward network are those of the recipe's model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from shardwise.core.errors import RecipeError
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.presets import dimensions_of
from shardwise.recipe.sections import ModelSpec

_ASPECTS = ((32, 12.0), (256, 32.0), (768, 64.0), (2048, 85.0), (4096, 128.0), (16384, 130.0))
"""Width, and width / layers: small byte-level models, GPT-3's 125M and 1.3B, Llama's 7B and 405B."""
_HEAD_WIDTHS = ((0, 16), (256, 32), (512, 64), (4096, 128))
"""From this width on, the width of a head."""
_HEADS = ((0, 2), (1024, 4), (2048, 8))
"""From this width on, the heads are a multiple of this, so that tensor parallelism within a node divides them."""
_WIDTH_RANGE = (32, 32768)
_DEPTH_RANGE = (0.75, 1.3)
"""Least and greatest depth, relative to the depth of the aspect ratio."""
_SIZE_GROWTH = 0.12
"""Growth of the parameters from one size to the next, as a difference of logarithms."""


def family_of(spec: ModelSpec) -> Dimensions:
    """The recipe's model as the pattern of its family.

    Raises:
        RecipeError: the model is not a native decoder, is a mixture of experts, or has latent attention.
    """
    if spec.hf is not None or spec.factory is not None:
        raise RecipeError(
            "no family of sizes",
            where="model",
            why="a model of hf or factory has one size",
            fix="give model: {preset: NAME} or dimensions, whose family is searched",
        )
    dimensions = dimensions_of(spec)
    if dimensions.experts:
        raise RecipeError(
            "no family of sizes",
            where="model.experts",
            why="the laws are of dense models, and one of total parameters misjudges a mixture of experts",
            fix="give a dense model of as many active parameters",
        )
    if dimensions.kv_lora_rank:
        raise RecipeError(
            "no family of sizes",
            where="model.kv_lora_rank",
            why="no published sizes tell how the latent vectors grow with the width",
            fix="give a model without latent attention",
        )
    return dimensions


def family_sizes(pattern: Dimensions) -> list[Dimensions]:
    """The family from about 0.1 million to a trillion parameters, by size, in steps of about 12 %.

    Of several depths and widths of about one size, the one with the published aspect ratio is taken.
    """
    by_step: dict[int, tuple[float, Dimensions]] = {}
    for width in _widths():
        depth = width / aspect(width)
        for layers in range(
            max(1, math.ceil(_DEPTH_RANGE[0] * depth)), math.floor(_DEPTH_RANGE[1] * depth) + 2
        ):
            size = sized(pattern, width, layers)
            step = round(math.log(size.parameters) / _SIZE_GROWTH)
            deviation = abs(math.log(layers / depth))
            if step not in by_step or deviation < by_step[step][0]:
                by_step[step] = deviation, size
    return sorted((size for _, size in by_step.values()), key=lambda size: size.parameters)


def _widths() -> Iterator[int]:
    width = _WIDTH_RANGE[0]
    while width <= _WIDTH_RANGE[1]:
        yield width
        # The next width that has whole heads, as many as _HEADS asks for.
        quantum = _step_value(_HEAD_WIDTHS, width) * _step_value(_HEADS, width)
        width = (width // quantum + 1) * quantum


def sized(pattern: Dimensions, width: int, layers: int) -> Dimensions:
    """The family's model of a width, which is a multiple of its head width, and a depth."""
    heads = width // _step_value(_HEAD_WIDTHS, width)
    kv_heads = heads
    if pattern.kv_heads < pattern.heads:  # grouped-query attention: as many groups as divide the heads
        kv_heads = max(groups for groups in range(1, pattern.kv_heads + 1) if heads % groups == 0)
    quantum = 256 if width >= 1024 else 32
    # A ratio that is whole but for rounding is not rounded up to the next multiple.
    ffn = math.ceil(pattern.ffn / pattern.width * width / quantum - 1e-9) * quantum
    return replace(
        pattern, layers=layers, width=width, heads=heads, head_dim=None, kv_heads=kv_heads, ffn=ffn
    )


def aspect(width: int) -> float:
    """Width / layers, interpolated between published models on logarithmic scales."""
    if width <= _ASPECTS[0][0]:
        return _ASPECTS[0][1]
    for (low, at_low), (high, at_high) in pairwise(_ASPECTS):
        if width <= high:
            share = math.log(width / low) / math.log(high / low)
            return at_low * (at_high / at_low) ** share
    return _ASPECTS[-1][1]


def _step_value(steps: tuple[tuple[int, int], ...], width: int) -> int:
    """The value that holds for a width."""
    return next(value for least, value in reversed(steps) if width >= least)
