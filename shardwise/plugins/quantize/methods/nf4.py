"""Weights in NF4 with double quantization (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)."""

from __future__ import annotations

from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.rounding import in_groups
from shardwise.runtime.quantization.weights import NF4Weight
from shardwise.runtime.quantized import Packing


def nf4_weight(weight: Tensor, scheme: Scheme) -> NF4Weight:
    """The nearest of NF4's 16 levels in blocks of 64 consecutive values, packed as QLoRA's frozen weights are.

    Raises NotConverged for weights that are not finite, and for input channels that are no multiple of 64.
    """
    values = in_groups(weight, scheme).flatten(1)
    packing = Packing("nf4", *values.shape)
    every_row = slice(0, packing.shape[0])
    return NF4Weight(packing.pack(values, every_row), packing)
