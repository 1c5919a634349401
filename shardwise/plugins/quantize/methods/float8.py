"""Weights in float8 e4m3 with one scale per output channel (Micikevicius et al. 2022, arXiv:2209.05433)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.rounding import in_groups, stored_dtype
from shardwise.runtime.quantization.weights import Float8Weight


def float8_weight(weight: Tensor, scheme: Scheme) -> Float8Weight:
    """The nearest e4m3 values, scaled so that a row's largest weight is e4m3's largest number, 448.

    Clipping does not help: a floating-point format has the same relative error at every magnitude.
    Raises NotConverged for weights that are not finite.
    """
    rows = in_groups(weight, scheme).squeeze(1)
    largest = torch.finfo(torch.float8_e4m3fn).max
    dtype = stored_dtype(weight)
    scale = (rows.abs().amax(1, keepdim=True) / largest).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    # A scale that was rounded down puts the largest weight above 448, and e4m3fn has no infinity: the cast gives NaN.
    values = (rows / scale.float()).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return Float8Weight(values, scale)
