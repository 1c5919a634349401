"""AWQ: activation-aware scales and clipping (Lin et al. 2023, arXiv:2306.00978).

A few input channels have large activations, and the error of their weights counts most. Their weights are multiplied
by a scale before rounding, and the layer before them (a norm, or a linear layer) is divided by it: the product
stays, and the error of these channels falls. The scale is (mean of |x|)^alpha per channel; a grid of alpha in 0 to 1
finds the least output error of all layers that read this input (section 3.2, equations 4 and 5).

Then ranges are clipped for the least output error (section 5.1 of the paper's code), with the Hessian of each group.

``AWQ.prepare`` finds the ``scaling_groups`` of a block and folds the ``awq_scale`` of each into it. Then
``AWQ.quantize`` clips each layer with the statistics ``divided`` by the scale. A block of unknown shape gets clipping
alone. An expert's up projection is divided by the scale of its down projection (experts.py).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.blocks import (
    ATTENTION_LAYERS,
    BLOCK_NORMS,
    DOWN,
    GATE,
    UP,
    fold,
    pre_norm_block,
)
from shardwise.plugins.quantize.methods.base import InputStatistics, NotConverged, QuantizationMethod
from shardwise.plugins.quantize.methods.rounding import (
    REHEARSED,
    WHOLE_SEARCH,
    Search,
    absmax,
    clipped,
    in_groups,
    stored_dtype,
)
from shardwise.runtime.quantization.weights import QuantizedWeight

ALPHA_STEPS = 20
SEARCHED_ROWS = 512
"""The most output channels of a layer, evenly spaced, that the search of alpha looks at."""


@dataclass(frozen=True)
class ScalingGroup:
    """Layers of a block that read the same input, and the layer that a scale of this input is folded into.

    Attributes:
        previous: name of the norm or linear layer, within the block.
        layers: names of all linear layers that read its output. Statistics of the first are those of all.
    """

    previous: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class AWQ(QuantizationMethod):
    """Clipping for the least output error; scales are folded before (``awq_scale``).

    Attributes:
        symmetric: levels without zero points. 8-bit activations always have them.
        steps: of alpha from 0 (no scaling) to 1.
        search: of the ranges.
    """

    name = "awq"
    calibrated = True
    folds = True
    symmetric: bool = False
    steps: int = ALPHA_STEPS
    search: Search = WHOLE_SEARCH

    def prepare(
        self, block: nn.Module, statistics: MutableMapping[str, InputStatistics], scheme: Scheme
    ) -> Sequence[str]:
        changed: list[str] = []
        for group in scaling_groups(block):
            input_statistics = statistics.get(group.layers[0])
            if input_statistics is None:  # no calibration token reaches these layers
                continue
            layers = [block.get_submodule(name) for name in group.layers]
            linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
            weights = [layer.weight for layer in linear]
            try:
                scale = awq_scale(weights, input_statistics, scheme, self.symmetric, self.steps)
            except NotConverged:  # a layer without levels stays as it is; its neighbours are clipped
                continue
            fold(block.get_submodule(group.previous), linear, scale)
            # These layers now read divided inputs, and ``quantize`` clips their weights for these.
            statistics.update(dict.fromkeys(group.layers, input_statistics.divided(scale)))
            changed += [group.previous, *group.layers]
        # A layer may be in two groups, such as up_proj: it reads a norm, and down_proj's scale is folded into it.
        return list(dict.fromkeys(changed))

    def channel_scale(self, weight: Tensor, statistics: InputStatistics, scheme: Scheme) -> Tensor | None:
        return awq_scale([weight], statistics, scheme, self.symmetric, self.steps)

    def quantize(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics | None) -> QuantizedWeight:
        groups = in_groups(weight, scheme)
        if statistics is None:
            raise ValueError("awq needs the statistics of the layer's inputs")
        symmetric = self.symmetric or scheme.activation_bits == 8
        importance = _importance(statistics.hessian.float(), scheme)
        levels = clipped(groups, scheme.bits, symmetric, stored_dtype(weight), importance, self.search)
        return levels.weight(levels.codes(groups), scheme.activation_bits)

    def without_zero_points(self) -> QuantizationMethod:
        return replace(self, symmetric=True)

    def rehearsal(self) -> QuantizationMethod:
        return replace(self, steps=1, search=REHEARSED)


def scaling_groups(block: nn.Module) -> list[ScalingGroup]:
    """The inputs of a Llama-shaped block that can be scaled; none for another block.

    ``v_proj`` is scaled for ``o_proj`` when every query head has its own values, ``up_proj`` for ``down_proj`` when a
    gate multiplies it (a nonlinear function between two layers would not commute with the scale).
    """
    try:
        parts = pre_norm_block(block, "--method")
    except RecipeError:
        return []
    gated = parts.gate is not None
    groups = [
        ScalingGroup(BLOCK_NORMS[0], ATTENTION_LAYERS[:3]),
        ScalingGroup(BLOCK_NORMS[1], (GATE, UP) if gated else (UP,)),
    ]
    # Values that several query heads share have one scale for all of these heads, but o_proj has columns for each.
    if parts.v.out_features == parts.o.in_features:
        groups.insert(1, ScalingGroup(ATTENTION_LAYERS[2], ATTENTION_LAYERS[3:]))
    return [*groups, ScalingGroup(UP, (DOWN,))] if gated else groups


def awq_scale(
    weights: Sequence[Tensor],
    statistics: InputStatistics,
    scheme: Scheme,
    symmetric: bool = False,
    steps: int = ALPHA_STEPS,
) -> Tensor:
    """The scale [in] of an input that gives its layers the least sum of squared output errors.

    Args:
        weights: [out, in] of every layer that reads this input.
        statistics: of this input.
        scheme: of the layers.
        symmetric, steps: as AWQ's settings.

    Raises NotConverged as ``rounding.in_groups``.
    """
    symmetric = symmetric or scheme.activation_bits == 8
    strides = [-(-weight.shape[0] // SEARCHED_ROWS) for weight in weights]
    sampled = [weight[::stride] for weight, stride in zip(weights, strides, strict=True)]
    hessian = statistics.hessian.float()
    magnitude = statistics.magnitude.float()
    best_scale = torch.ones_like(magnitude)
    least_error = torch.inf
    for step in range(steps + 1):
        scale = _channel_scale(magnitude, step / steps)
        errors = [_output_error(weight, scale, hessian, scheme, symmetric) for weight in sampled]
        # Each sampled row stands for ``stride`` rows, so layers of any height count by their whole error.
        error = sum(layer_error * stride for layer_error, stride in zip(errors, strides, strict=True))
        if error < least_error:
            best_scale, least_error = scale, error
    return best_scale


def _channel_scale(magnitude: Tensor, alpha: float) -> Tensor:
    """magnitude^alpha, with the geometric mean of its extremes at 1."""
    # A silent channel would get the scale 0, by which no layer can be divided; 1.0 is for inputs that are all 0.
    scale = magnitude.clamp(min=1e-4 * float(magnitude.max()) or 1.0) ** alpha
    return scale / (scale.max() * scale.min()).sqrt()


def _output_error(weight: Tensor, scale: Tensor, hessian: Tensor, scheme: Scheme, symmetric: bool) -> float:
    """Mean squared output error over the tokens, summed over the rows of the weight."""
    scaled = in_groups(weight.float() * scale, scheme)  # [out, groups, size]
    # Without clipping, which is searched once after the scale is known: alpha has a whole grid of trials.
    levels = absmax(scaled, scheme.bits, symmetric, stored_dtype(weight))
    # Back to the unscaled inputs, whose Hessian is known. [out, in]
    difference = levels.rounded(scaled).sub_(scaled).flatten(1) / scale
    return float((difference @ hessian * difference).sum())


def _importance(hessian: Tensor, scheme: Scheme) -> Tensor:
    """The Hessian of each group [groups, size, size]; its diagonal [in] for a scale per channel."""
    size = scheme.group
    # Without a least importance, a group that no token used would have the error 0 for every range.
    if size is None:
        diagonal = hessian.diagonal()
        return diagonal.clamp(min=1e-4 * float(diagonal.mean()) or 1.0)
    count = hessian.shape[0] // size
    # The blocks [size, size] on the diagonal. ``diagonal`` puts their index last: [size, size, groups].
    parts = hessian.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    damping = 1e-4 * float(hessian.diagonal().mean()) or 1.0
    return (parts + damping * torch.eye(size, device=hessian.device)).contiguous()
