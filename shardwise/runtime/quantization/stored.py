"""Reads the stored tensors of a quantized weight back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.runtime.quantization.bitsandbytes import BLOCKS, bitsandbytes_weight_of
from shardwise.runtime.quantization.kashin import FACTORS, kashin_weight_of
from shardwise.runtime.quantization.packing import from_words
from shardwise.runtime.quantization.weights import (
    COLUMN_GROUPS,
    FP4,
    NF4,
    PACKED,
    SCALE,
    ZERO,
    Float4Weight,
    Float8Weight,
    IntWeight,
    NF4Weight,
    QuantizedWeight,
)
from shardwise.runtime.quantized import Packing


def weight_of(tensors: Mapping[str, Tensor], width: int, shape: tuple[int, int]) -> QuantizedWeight:
    """The weight [out, in] whose ``tensors()`` these are. ``width``: bits per code of integer codes."""
    if NF4 in tensors:
        return NF4Weight(tensors[NF4], Packing("nf4", *shape))
    if FACTORS in tensors:
        return kashin_weight_of(tensors, shape)
    if BLOCKS in tensors:
        return bitsandbytes_weight_of(tensors, shape)
    if FP4 in tensors:
        return Float4Weight(tensors[FP4], tensors[SCALE])
    scale = tensors[SCALE]
    zero = tensors.get(ZERO)
    group_of = tensors.get(COLUMN_GROUPS)
    if PACKED in tensors:
        codes = from_words(tensors[PACKED], width, shape[1])
        zero = None if zero is None else from_words(zero.t(), width, shape[0]).t().contiguous()
        return IntWeight(codes, scale, zero, width, group_of=group_of)
    codes = tensors["weight"]
    if codes.dtype == torch.float8_e4m3fn:
        return Float8Weight(codes, scale)
    return IntWeight(codes, scale, zero, width, 8, group_of)
