"""How published models are stored in floats of 8 and 4 bits.

fp8            weight (e4m3) and weight_scale_inv, which is a scale of each block of [128, 128] weights or of the tensor
               (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3). Weight = value * scale, whatever its name says
mxfp4          NAME_blocks [e, out, in / 32, 16] and NAME_scales [e, out, in / 32]: stacks of experts (gpt-oss)
bitsandbytes   4 bits: weight [out in / 2, 1], weight.absmax, weight.quant_map, weight.nested_absmax,
               weight.nested_quant_map, and a JSON text in weight.quant_state. 8 bits: weight, SCB [out]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.model.files.quantized_layers import Format, Tensors, scales_per_row
from shardwise.runtime.quantization.bitsandbytes import BitsAndBytesWeight, DoubleQuantization
from shardwise.runtime.quantization.weights import Float4Weight, Float8Weight, IntWeight

_STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True)
class BlockScaledFormat(Format):
    """``block``: rows and columns that share a scale, or None for one scale. Layers of packed e2m1 have their own."""

    block: tuple[int, int] | None = None
    marks = ("weight_scale_inv", "scale", "qscale_weight")
    parts = ("weight", *marks, "activation_scale", "input_scale")

    def shape(self, tensors: Tensors, read: Callable[[str], Tensor]) -> tuple[int, ...]:
        rows, columns = tensors["weight"].shape
        if not tensors["weight"].is_floating_point():
            columns *= 2  # two e2m1 values in a byte
        return rows, columns

    def weight(self, tensors: Tensors, shape: tuple[int, int]) -> Float8Weight | Float4Weight:
        values = tensors["weight"]
        scale = next(tensors[mark] for mark in self.marks if mark in tensors)
        # Powers of two (MX formats), whose exponents some tools store as plain bytes.
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        if not values.is_floating_point():
            return Float4Weight(values.view(torch.uint8), scale)
        scale = scale.float() if scale.itemsize == 1 else scale  # no arithmetic in e8m0
        return Float8Weight(values, scales_per_row(scale, shape, self.block if scale.dim() else None))


@dataclass(frozen=True)
class MXFP4Stack(Format):
    """Stacks of experts in MXFP4, under the names of gpt-oss."""

    marks = ("blocks",)
    parts = ("blocks", "scales")
    separator = "_"
    weight_suffix = ""
    stacked = True

    def shape(self, tensors: Tensors, read: Callable[[str], Tensor]) -> tuple[int, ...]:
        count, rows, groups, pairs = tensors["blocks"].shape
        return count, groups * pairs * 2, rows  # [e, in, out], as the model has it

    def weight(self, tensors: Tensors, shape: tuple[int, int]) -> Float4Weight:
        return Float4Weight(tensors["blocks"].flatten(1), tensors["scales"].view(torch.float8_e8m0fnu))


@dataclass(frozen=True)
class BitsAndBytesFormat(Format):
    """Linear layers of bitsandbytes, in 4 or in 8 bits."""

    marks = (f"{_STATE}nf4", f"{_STATE}fp4", "SCB")
    parts = (
        "weight",
        *marks,
        "weight_format",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
    )
    read_to_plan = marks[:2]

    def shape(self, tensors: Tensors, read: Callable[[str], Tensor]) -> tuple[int, ...]:
        mark = next(mark for mark in self.marks if mark in tensors)
        return tuple(tensors["weight"].shape if mark == "SCB" else _state(read(mark))["shape"])

    def weight(self, tensors: Tensors, shape: tuple[int, int]) -> BitsAndBytesWeight | IntWeight:
        weight = tensors["weight"]
        if "SCB" in tensors:
            # SCB is the largest absolute value of a row, which has the code 127.
            return IntWeight(weight, tensors["SCB"].float().view(-1, 1) / 127, None, 8, 8)
        state = next(tensors[mark] for mark in self.read_to_plan if mark in tensors)
        double = None
        if "weight.nested_absmax" in tensors:
            offset = torch.tensor([_state(state)["nested_offset"]])
            double = DoubleQuantization(
                tensors["weight.nested_quant_map"].float(), tensors["weight.nested_absmax"].float(), offset
            )
        table = tensors["weight.quant_map"].float()
        scales = tensors["weight.absmax"]
        return BitsAndBytesWeight(*shape, weight.view(torch.uint8).flatten(), table, scales, double)


def _state(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
