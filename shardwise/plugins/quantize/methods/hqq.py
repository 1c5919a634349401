"""HQQ: half-quadratic quantization, without data (Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog/).

Minimizes the l_p norm (p = 0.7) of the rounding error E, which lets few outliers go wrong for the sake of all other
weights. Half-quadratic splitting adds a variable for the error and alternates three steps:

    E    <- shrink(W - Ŵ) = sign(x) max(|x| - |x|^(p-1) / β, 0)      generalized soft thresholding
    s, z <- least squares of s (Q - z) against W - E                 scale, then zero point
    β    <- 1.01 β

The published method keeps the scale and moves the zero point, which it stores as a real number. The zero points of
compressed-tensors are integers, and an integer step moves no level, so the scale is fitted too. β = 10 applies to
errors in units of the scale; the published code applies it to the errors themselves, and shrinking leaves nothing of
4-bit errors. The start is the clipped range. Every group keeps the best of its 20 iterates, with a rounded zero point.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.base import InputStatistics, QuantizationMethod
from shardwise.plugins.quantize.methods.rounding import (
    REHEARSED,
    WHOLE_SEARCH,
    Levels,
    Search,
    clipped,
    in_groups,
    in_parts,
    stored_dtype,
    stored_scale,
)
from shardwise.runtime.quantization.weights import QuantizedWeight


@dataclass(frozen=True)
class HalfQuadratic(QuantizationMethod):
    """Levels of least l_p error.

    Attributes:
        norm: p, above 0 and below 1.
        iterations: alternations.
        penalty: the first β, for errors in units of the scale.
        growth: factor of β per alternation.
        symmetric: levels without zero points.
        search: of the first range.
    """

    name = "hqq"
    norm: float = 0.7
    iterations: int = 20
    penalty: float = 10.0
    growth: float = 1.01
    symmetric: bool = False
    search: Search = WHOLE_SEARCH

    def quantize(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics | None) -> QuantizedWeight:
        groups = in_groups(weight, scheme)
        dtype = stored_dtype(weight)

        def fitted(part: Tensor) -> Levels:
            return self._fitted(part, clipped(part, scheme.bits, self.symmetric, dtype, search=self.search))

        levels = in_parts(groups, fitted)
        return levels.weight(levels.codes(groups), scheme.activation_bits)

    def without_zero_points(self) -> QuantizationMethod:
        return replace(self, symmetric=True)

    def rehearsal(self) -> QuantizationMethod:
        return replace(self, iterations=min(self.iterations, 2), search=REHEARSED)

    def _fitted(self, groups: Tensor, start: Levels) -> Levels:
        """The best levels of every group [out, groups, size], from the given ones on."""
        half = 1 << start.bits - 1
        beta = self.penalty
        scale = start.scale  # [out, groups]
        zero = torch.zeros_like(start.scale) if start.zero is None else start.zero
        best_scale = scale
        best_zero = zero
        least_loss = torch.full_like(scale, torch.inf)
        for _ in range(self.iterations):
            # Iterates are rounded as they are stored before their loss is taken, so the best one is really the best.
            levels = Levels(stored_scale(scale, start.dtype), zero.round(), start.bits, start.dtype)
            assert levels.zero is not None
            steps = levels.codes(groups).sub_(levels.zero.unsqueeze(2))  # Q - z
            error = groups - steps * levels.scale.unsqueeze(2)
            loss = error.abs().pow_(self.norm).sum(2)  # ‖E‖_p^p of each group
            better = loss < least_loss
            least_loss = torch.where(better, loss, least_loss)
            best_scale = torch.where(better, levels.scale, best_scale)
            best_zero = torch.where(better, levels.zero, best_zero)
            target = groups - self._shrunken(error, levels.scale.unsqueeze(2), beta)
            # Steps are integers, so their squares sum to 0 or to at least 1.
            scale = (steps * target).sum(2) / steps.square().sum(2).clamp(min=1)
            scale = torch.where(scale > 0, scale, levels.scale)
            if start.zero is not None:
                # Least squares of s (Q - z) against the target: z moves by the mean of the remainder, in steps.
                shift = (steps - target / scale.unsqueeze(2)).mean(2)
                zero = (levels.zero + shift).clamp(-half, half - 1)
            beta *= self.growth
        return Levels(best_scale, None if start.zero is None else best_zero, start.bits, start.dtype)

    def _shrunken(self, error: Tensor, scale: Tensor, beta: float) -> Tensor:
        """The part of the error that its threshold leaves."""
        size = (error / scale).abs()
        # p - 1 is negative: without a least size, an error of 0 would have an infinite threshold.
        threshold = size.clamp(min=1e-6).pow(self.norm - 1).div_(beta)
        return (size - threshold).clamp_(min=0).mul_(scale).copysign_(error)
