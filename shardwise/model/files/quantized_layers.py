"""How other tools store quantized linear layers, each read as one of our weights. The floats are in float_layers.py.

compressed-tensors   weight_packed or weight, weight_scale, weight_zero_point; [out, in]
GPTQ                 qweight [in · bits / 32, out], qzeros, scales [groups, out], g_idx [in]; version 1 of the format
                     stores zero points less one
AWQ                  qweight [in, out / 8], qzeros, scales [groups, out]; the 8 codes of a word are channels
                     0, 2, 4, 6, 1, 3, 5, 7
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardwise.runtime.quantization.kashin import FACTORS
from shardwise.runtime.quantization.kashin import STORED_TENSORS as KASHIN
from shardwise.runtime.quantization.packing import bytes_in, from_words, signed, unpack_bits
from shardwise.runtime.quantization.stored import weight_of
from shardwise.runtime.quantization.weights import (
    COLUMN_GROUPS,
    NF4,
    PACKED,
    SCALE,
    SHAPE,
    ZERO,
    IntWeight,
    QuantizedWeight,
)

Tensors = Mapping[str, Tensor]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of 8 channels."""


@dataclass(frozen=True)
class Format(ABC):
    """How one layer is stored: tensors called PATH, ``separator`` and a suffix. ``width``: bits per code."""

    width: int
    marks: ClassVar[tuple[str, ...]]
    """A layer that has a tensor with one of these suffixes is quantized."""
    parts: ClassVar[tuple[str, ...]]
    """All suffixes that belong to a quantized layer."""
    read_to_plan: ClassVar[tuple[str, ...]] = ()
    """Suffixes of small tensors whose values decide the form of the weight."""
    separator: ClassVar[str] = "."
    weight_suffix: ClassVar[str] = ".weight"
    """What follows PATH in the name of the weight."""
    stacked: ClassVar[bool] = False
    """Whether the weight is a stack of transposed matrices [e, in, out]; stored tensors have e as their first dim."""

    @abstractmethod
    def shape(self, tensors: Tensors, read: Callable[[str], Tensor]) -> tuple[int, ...]:
        """(out, in) or that of a stack, from the stored tensors on the meta device by suffix. ``read`` reads one."""

    @abstractmethod
    def weight(self, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        """The weight of the stored tensors, or of those of one matrix of a stack.

        They may be on the meta device except for those of ``read_to_plan``.
        """


@dataclass(frozen=True)
class CompressedTensors(Format):
    """Our own folders and those of compressed-tensors. ``block``: rows and columns that share a scale, or None."""

    block: tuple[int, int] | None = None
    marks = (SCALE, NF4, FACTORS)
    parts = (
        PACKED,
        "weight",
        SCALE,
        ZERO,
        SHAPE,
        COLUMN_GROUPS,
        NF4,
        *KASHIN,
        "input_scale",
        "input_scale_ub",
        "input_zero_point",
    )
    read_to_plan = (FACTORS,)

    def shape(self, tensors: Tensors, read: Callable[[str], Tensor]) -> tuple[int, ...]:
        return tuple(read(SHAPE).tolist() if SHAPE in tensors else tensors["weight"].shape)

    def weight(self, tensors: Tensors, shape: tuple[int, int]) -> QuantizedWeight:
        if NF4 in tensors or FACTORS in tensors:
            return weight_of(tensors, self.width, shape)
        parts = dict(tensors)
        parts[SCALE] = scales_per_row(tensors[SCALE], shape, self.block)
        packed = parts.get(PACKED)
        if ZERO in parts and packed is None:
            parts[ZERO] = scales_per_row(parts[ZERO], shape, self.block)
        if packed is not None and packed.shape[1] != -(-shape[1] * self.width // 32):
            return self._with_gaps(parts, shape)
        return weight_of(parts, self.width, shape)

    def _with_gaps(self, tensors: Tensors, shape: tuple[int, int]) -> IntWeight:
        """Codes of 3, 5, 6 or 7 bits as compressed-tensors packed them before 0.18: no code crosses a word."""
        words = tensors[PACKED].shape[1]
        expected = -(-shape[1] // (32 // self.width))
        if words != expected:
            raise ValueError(
                f"a row of {shape[1]} codes has {words} words, not {expected} as in {self.width} bits"
            )
        zero = tensors.get(ZERO)
        zeros = None if zero is None else _spaced(zero.t(), self.width, shape[0]).t().contiguous()
        codes = _spaced(tensors[PACKED], self.width, shape[1])
        return IntWeight(codes, tensors[SCALE], zeros, self.width, group_of=tensors.get(COLUMN_GROUPS))


def scales_per_row(scale: Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> Tensor:
    """A scale of the whole tensor, of channels, of groups or of blocks [out, in] as [out, groups of equal size]."""
    rows, columns = shape
    if block is not None:
        # The last block may be cut off, so a group is as long as divides the columns, too.
        group = math.gcd(columns, block[1])
        scale = scale.repeat_interleave(block[0], 0)[:rows]
        scale = scale.repeat_interleave(block[1] // group, 1)[:, : columns // group]
    by_row = scale.view(-1, 1) if scale.dim() < 2 else scale
    return by_row.expand(rows, -1).contiguous()  # one scale of the tensor becomes one for each row


def _spaced(words: Tensor, width: int, count: int) -> Tensor:
    """Signed codes [rows, count] of words [rows, words], each of which has whole codes from its lowest bit on."""
    shifts = torch.arange(32 // width, dtype=torch.int32) * width
    mask = (1 << width) - 1
    codes = words.unsqueeze(2) >> shifts & mask  # [rows, words, codes of a word]
    return signed(codes.flatten(1)[:, :count].to(torch.uint8), width)


@dataclass(frozen=True)
class GPTQFormat(Format):
    """GPTQ's layers. ``group``: input channels per scale, -1 for all; ``offset``: is added to stored zeros."""

    group: int
    offset: int
    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")
    read_to_plan = ("g_idx",)

    def shape(self, tensors: Tensors, read: Callable[[str], Tensor]) -> tuple[int, ...]:
        words, rows = tensors["qweight"].shape
        return rows, words * 32 // self.width

    def weight(self, tensors: Tensors, shape: tuple[int, int]) -> IntWeight:
        rows, columns = shape
        codes = from_words(tensors["qweight"].t(), self.width, columns)  # words are along the inputs
        stored = unpack_bits(bytes_in(tensors["qzeros"]), self.width, rows)
        # In 16 bits, since the largest zero point plus one overflows a code. The sum wraps around.
        zeros = (stored.to(torch.int16) + self.offset) % (1 << self.width)
        zero = signed(zeros.to(torch.uint8), self.width).t().contiguous()
        group_size = columns if self.group == -1 else self.group
        consecutive = torch.arange(columns, dtype=torch.int32) // group_size
        # Without act-order g_idx is consecutive and says nothing new.
        group_of = tensors.get("g_idx")
        same = group_of is None or torch.equal(group_of, consecutive)
        scale = tensors["scales"].t().contiguous()
        return IntWeight(codes, scale, zero, self.width, group_of=None if same else group_of)


@dataclass(frozen=True)
class AWQFormat(Format):
    """AWQ's layers, in 4 bits."""

    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales")

    def shape(self, tensors: Tensors, read: Callable[[str], Tensor]) -> tuple[int, ...]:
        columns, words = tensors["qweight"].shape
        return words * 8, columns

    def weight(self, tensors: Tensors, shape: tuple[int, int]) -> IntWeight:
        codes, zero = (_awq_codes(tensors[name], shape[0]) for name in ("qweight", "qzeros"))
        return IntWeight(codes, tensors["scales"].t().contiguous(), zero, self.width)


def _awq_codes(words: Tensor, rows: int) -> Tensor:
    """Signed codes [out, in or groups] of words [in or groups, out / 8]."""
    codes = unpack_bits(bytes_in(words), 4, rows).view(words.shape[0], -1, 8)
    return signed(codes[..., list(_AWQ_ORDER)].flatten(1), 4).t().contiguous()
