"""GPTQ: rounding with error feedback through the inverse Hessian (Frantar et al. 2022, arXiv:2210.17323).

Input channels are rounded one after another. The error of a channel is moved to the channels that follow, by the rule
of optimal brain surgeon; the Cholesky factor U of the inverse Hessian (UᵀU = H⁻¹) holds all of these rules (section
3.3, step 3). Within a block of 128 channels the update is immediate; later blocks receive it as one product.

Channels are taken in the order of falling diagonal of the Hessian (act-order). Groups keep their consecutive channels
and get their scales before the first channel is rounded ("static groups"), so the stored weight needs no ``g_idx``.
Scales are clipped for the squared error, weighted with the diagonal.

The Hessian is damped with 1 % of its mean diagonal, ten times as much when the factorization fails. Channels without
any input are rounded to nearest; the reference sets them to 0, which a token outside the calibration data would notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.base import InputStatistics, NotConverged, QuantizationMethod
from shardwise.plugins.quantize.methods.rounding import (
    REHEARSED,
    WHOLE_SEARCH,
    Levels,
    Search,
    clipped,
    in_groups,
    round_to_codes,
    stored_dtype,
)
from shardwise.runtime.quantization.weights import QuantizedWeight

COLUMN_BLOCK = 128
HESSIAN_DAMPING, LARGEST_DAMPING = 0.01, 1.0


@dataclass(frozen=True)
class GPTQ(QuantizationMethod):
    """Rounding with error feedback.

    Attributes:
        symmetric: levels without zero points. 8-bit activations always have them.
        act_order: take channels in the order of falling diagonal of the Hessian instead of their own.
        block: channels whose errors are moved to later channels at once; the result does not depend on it.
        search: of the ranges.
    """

    name = "gptq"
    calibrated = True
    symmetric: bool = True
    act_order: bool = True
    block: int = COLUMN_BLOCK
    search: Search = WHOLE_SEARCH
    _steps: ClassVar[int | None] = None
    """Columns of a block that are rounded; None for all."""

    def quantize(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics | None) -> QuantizedWeight:
        groups = in_groups(weight, scheme)
        if statistics is None:
            raise ValueError("gptq needs the statistics of the layer's inputs")
        hessian = statistics.hessian.float()
        diagonal = hessian.diagonal()
        symmetric = self.symmetric or scheme.activation_bits == 8
        # A group that no token used would have the error 0 for every range; 1.0 is for a Hessian of zeros.
        importance = diagonal.clamp(min=1e-4 * float(diagonal.mean()) or 1.0)
        levels = clipped(groups, scheme.bits, symmetric, stored_dtype(weight), importance, self.search)
        order = diagonal.argsort(descending=True, stable=True)
        if not self.act_order:
            order = torch.arange(weight.shape[1], device=weight.device)
        # Input channels first, [in, out]: the loop reads and writes one channel at a time, in contiguous memory.
        columns = groups.flatten(1).T[order].contiguous()
        factor = inverse_factor(hessian[order][:, order])
        codes = torch.empty_like(columns)
        # ``order`` holds the channels' own numbers, so it gives their groups, and it puts the codes back.
        codes[order] = self._rounded(columns, factor, levels, order // groups.shape[2])
        return levels.weight(codes.T.contiguous(), scheme.activation_bits)

    def rehearsal(self) -> QuantizationMethod:
        return _Rehearsal(self.symmetric, self.act_order, self.block, REHEARSED)

    def _rounded(self, columns: Tensor, factor: Tensor, levels: Levels, group: Tensor) -> Tensor:
        """Codes of columns [in, out], which are overwritten, with the factor [in, in] and the group of each."""
        by_group = levels.transposed()
        codes = torch.empty_like(columns)
        for start in range(0, columns.shape[0], self.block):
            part = slice(start, start + self.block)
            later = slice(start + self.block, None)
            errors = torch.empty_like(columns[part])
            # One copy to the host for each block of channels, instead of one for each channel.
            block_groups = group[part][: self._steps].tolist()
            _round_in_turn(columns[part], factor[part, part], by_group, block_groups, codes[part], errors)
            # [later, b] @ [b, out]: the errors of the block reach all later channels as one product.
            columns[later].addmm_(factor[part, later].T, errors, alpha=-1)
        return codes


class _Rehearsal(GPTQ):
    """Rounds one column of every block."""

    _steps = 1


def _round_in_turn(
    columns: Tensor, factor: Tensor, levels: Levels, group: Sequence[int], codes: Tensor, errors: Tensor
) -> None:
    """Round the columns of a block [b, out] one after another and move the error of each to those that follow.

    Args:
        columns: overwritten. factor: [b, b]. levels: [groups, out].
        group: of each column.
        codes, errors: [b, out], written.
    """
    for index, group_index in enumerate(group):
        scale = levels.scale[group_index]  # [out]
        zero = None if levels.zero is None else levels.zero[group_index]
        code = round_to_codes(columns[index], scale, zero, levels.bits)
        codes[index] = code
        level = (code if zero is None else code - zero) * scale
        # The update of optimal brain surgeon: the error over U's diagonal, times the rest of U's row.
        error = torch.div(columns[index] - level, factor[index, index], out=errors[index])
        columns[index + 1 :].addr_(factor[index, index + 1 :], error, alpha=-1)


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor U of the inverse of a damped Hessian [in, in]: UᵀU = (H + λ I)⁻¹.

    λ is 1 % of the mean diagonal, and ten times as much after each failure. Raises NotConverged when 100 % fails.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    # A channel without input has a row of zeros. With the mean on its diagonal, it takes no errors and gives none.
    whole = hessian + torch.diag(torch.where(diagonal > 0, 0.0, mean.clamp(min=1e-30)))
    damping = HESSIAN_DAMPING
    while damping <= LARGEST_DAMPING:
        damped = whole + torch.diag(torch.full_like(diagonal, damping) * mean)
        # ``cholesky_ex`` returns a number that is not 0 where ``cholesky`` raises; here failing is expected.
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            # An inverse that overflows to infinity is no failure for ``cholesky_ex``.
            if not int(failed) and bool(upper.isfinite().all()):
                return upper
        damping *= 10
    raise NotConverged("the Hessian of the inputs has no Cholesky factor, even when its diagonal is doubled")
