"""Frozen weights in 4 or 8 bits, packed so that FSDP2 can shard them by rows (QLoRA: Dettmers et al. 2023).

    nf4    the 16 levels of NF4; one scale per 64 values; 8-bit scales relative to the fp32 maximum of 256
    int8   256 levels; one fp32 scale per row of the weight (output channel)

A packed weight is one uint8 parameter with self-contained rows: codes, then their scales. A row of nf4 holds 256
consecutive blocks of 64 values: 8,192 bytes of codes, 256 of scales, 4 of their maximum; 4.127 bits per value. A rank
that all-gathers a row can unpack it. The weight is unpacked to the compute dtype for the forward product and again for
the backward product, which saves the packed form only.

8 unsigned bits represent the positive scales to half a per cent of a typical scale. The paper subtracts their mean,
which would make rows depend on each other. Values are coded with the rounded scale.

Refused: bitsandbytes and torchao, whose packed tensor classes FSDP2, fake tensors, checkpoints and the ledger would
need to know. The price is a few eager kernels, through fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.quantization.packing import levels_by_byte

NF4_LEVELS: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The levels of NF4, ascending (Dettmers et al. 2023, appendix E)."""

SCALE_BLOCK, GROUP = 64, 256
"""Values per scale, and scales per maximum."""

_UNPACKED = 2**25
"""Values of a stack that are unpacked at a time: 128 MiB in fp32. Fewer take more kernels, also in a dry run."""


@dataclass(frozen=True)
class Packing:
    """The packed format of a weight [rows, columns]. ``kind``: nf4 or int8."""

    kind: str
    rows: int
    columns: int

    @property
    def group(self) -> int:
        """Scales per row of nf4; fewer if the weight is small."""
        return min(GROUP, -(-self.rows * self.columns // SCALE_BLOCK))

    @property
    def values(self) -> int:
        """Values per packed row."""
        return self.columns if self.kind == "int8" else self.group * SCALE_BLOCK

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the packed weight, in bytes."""
        if self.kind == "int8":
            return self.rows, self.columns + 4
        return -(-self.rows * self.columns // self.values), self.group * (SCALE_BLOCK // 2 + 1) + 4

    def pack(self, weight: Tensor, rows: slice) -> Tensor:
        """Pack the part of a weight [rows, columns] that belongs to these packed rows."""
        flat = weight.detach().reshape(-1)[rows.start * self.values : rows.stop * self.values].float()
        flat = F.pad(flat, (0, (rows.stop - rows.start) * self.values - flat.numel()))
        return self.packed_parts(flat.view(rows.stop - rows.start, self.values))

    def packed_parts(self, parts: Tensor) -> Tensor:
        """Packed rows, from their fp32 values [n, values]."""
        return _pack_int8(parts) if self.kind == "int8" else _pack_nf4(parts)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns]."""
        values = self.values_in(packed)
        return values[: self.rows * self.columns].view(self.rows, self.columns).to(dtype)

    def values_in(self, packed: Tensor) -> Tensor:
        """The values of some packed rows, fp32 [n]; those after the weight's end are zero."""
        values = _unpack_int8(packed) if self.kind == "int8" else _unpack_nf4(packed, self.group)
        return values.flatten()


@dataclass(frozen=True)
class StackPacking:
    """The packed format of a stack of matrices [e, rows, columns]: [e, *shape of one], each packed on its own.

    So a shard of whole matrices can be unpacked by itself.
    """

    matrix: Packing

    def pack(self, stack: Tensor, part: slice) -> Tensor:
        """Pack these matrices of a stack, some at a time."""
        rows = self.matrix.shape[0]
        matrix = self.matrix
        padding = rows * matrix.values - self._size
        chunks = []
        for some in stack.detach()[part].split(self._at_a_time):
            flat = F.pad(some.float().reshape(some.shape[0], -1), (0, padding))
            packed = matrix.packed_parts(flat.view(-1, matrix.values))
            chunks.append(packed.view(some.shape[0], *matrix.shape))
        return torch.cat(chunks)

    @property
    def _size(self) -> int:
        return self.matrix.rows * self.matrix.columns

    @property
    def _at_a_time(self) -> int:
        """Matrices whose values are in fp32 at once."""
        return max(1, _UNPACKED // self._size)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrices [e, rows, columns], some at a time: the way through fp32 takes no more than those."""
        out = packed.new_empty((packed.shape[0], self.matrix.rows, self.matrix.columns), dtype=dtype)
        for part, into in zip(*(t.split(self._at_a_time) for t in (packed, out)), strict=True):
            values = self.values_in(part).view(part.shape[0], -1)[:, : self._size]
            into.copy_(values.view(into.shape))
        return out

    def values_in(self, packed: Tensor) -> Tensor:
        """The values of some packed matrices, fp32 [n]; those after a matrix's end are zero."""
        return self.matrix.values_in(packed.flatten(0, 1))


class Unpacks(Protocol):
    """The format of a packed weight [rows, columns]; ``shape`` is that of the uint8 parameter."""

    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor: ...


def _pack_int8(parts: Tensor) -> Tensor:
    # Symmetric: -128 stays unused, so a weight and its negative have codes of equal size.
    scale = parts.abs().amax(1, keepdim=True) / 127
    codes = (parts / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    # The fp32 scale is the last four bytes of a row: a shard of rows brings its scales.
    return torch.cat([codes.to(torch.int8).view(torch.uint8), scale.contiguous().view(torch.uint8)], 1)


def _unpack_int8(packed: Tensor) -> Tensor:
    scale = _last(packed)
    return packed[:, :-4].contiguous().view(torch.int8).float().mul_(scale)


def _pack_nf4(parts: Tensor) -> Tensor:
    blocks = parts.view(parts.shape[0], -1, SCALE_BLOCK)
    largest = blocks.abs().amax(2)
    top = largest.amax(1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    # At least 1: a code of 0 would turn a block of small values into zeros.
    scales = (largest / top.clamp(min=tiny) * 255).round().clamp(1, 255).to(torch.uint8)
    levels = _nf4_levels(parts.device)
    unit = blocks / _scales(scales, top).clamp(min=tiny).unsqueeze(2)
    # Borders half-way between levels make the bucket the nearest level.
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    # The even code is in the low half of a byte.
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.cat([pairs.flatten(1), scales, top.contiguous().view(torch.uint8)], 1)


def _unpack_nf4(packed: Tensor, group: int) -> Tensor:
    codes = packed[:, : -group - 4]
    scales = packed[:, -group - 4 : -4]
    levels = _nf4_levels(packed.device)
    values = F.embedding(codes.int(), levels_by_byte(levels)).view(packed.shape[0], group, SCALE_BLOCK)
    return values.mul_(_scales(scales, _last(packed)).unsqueeze(2))


def _nf4_levels(device: torch.device) -> Tensor:
    """The 16 levels on the device, by an asynchronous copy; ``torch.tensor`` on a device would wait for its queue."""
    return torch.tensor(NF4_LEVELS).to(device, non_blocking=True)


def _last(packed: Tensor) -> Tensor:
    """The fp32 value at the end of every row, [rows, 1]."""
    return packed[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)


def _scales(scales: Tensor, top: Tensor) -> Tensor:
    return scales.float() * (top / 255)


class _Product(torch.autograd.Function):
    """x [..., i] times the transposed unpacked weight [o, i]. Saves the packed weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, how: Unpacks) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.how = how
        return F.linear(x, how.unpack(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (packed,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return grads[0] @ ctx.how.unpack(packed, grads[0].dtype), None, None, None


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, how: Unpacks) -> Tensor:
    """``F.linear`` with a packed weight; weight and bias have no gradient."""
    out: Tensor = _Product.apply(x, packed, bias, how)
    return out


def bits_per_weight(how: Unpacks) -> float:
    """Packed bits per value of the weight."""
    return 8 * math.prod(how.shape) / (how.rows * how.columns)
