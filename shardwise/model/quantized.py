"""Frozen weights in 4 or 8 bits, packed so that they can be divided by rows (QLoRA: Dettmers et al. 2023).

    nf4    the 16 levels of NF4, a scale for 64 values; of 256 scales each is 8 bits of their largest, which is fp32
    int8   256 levels, an fp32 scale for every row of the weight (an output)

A packed weight is one uint8 parameter whose rows are self-contained: codes, then the scales of the codes. A row of nf4
is 256 blocks of 64 values, which lie one after the other in the weight: 8,192 bytes of codes, 256 of scales, 4 of the
largest: 4.127 bits a value. FSDP2 divides rows over ranks, gathers bytes beside 16-bit weights, and casts none of them;
whoever gathers a row can read it. Values are multiplied in the dtype of compute, which the layer's input has: the
weight is unpacked for the product of the forward pass, and again for the one of the backward pass, which keeps the
packed form (the gradient of the weight is never computed).

Scales are positive, so 8 unsigned bits from 0 to the largest hold them, to half a per cent of a typical one; the paper
subtracts their mean, which would make rows depend on each other. Values are coded with the scale as it is read back.

Refused: bitsandbytes and torchao, whose packed tensors are classes of their own: FSDP2, fake tensors, checkpoints and
the ledger would each have to know them. The price is that unpacking takes some eager kernels, through fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NF4: tuple[float, ...] = (
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

BLOCK, GROUP = 64, 256
"""Values that share a scale, and scales that share their largest."""


@dataclass(frozen=True)
class Packing:
    """How a weight [rows, columns] is packed. ``kind`` is nf4 or int8."""

    kind: str
    rows: int
    columns: int

    @property
    def group(self) -> int:
        """Scales in a row of nf4: fewer where the weight is small."""
        return min(GROUP, -(-self.rows * self.columns // BLOCK))

    @property
    def values(self) -> int:
        """Values in a packed row."""
        return self.columns if self.kind == "int8" else self.group * BLOCK

    @property
    def shape(self) -> tuple[int, int]:
        """Of the packed weight, in bytes."""
        if self.kind == "int8":
            return self.rows, self.columns + 4
        return -(-self.rows * self.columns // self.values), self.group * (BLOCK // 2 + 1) + 4

    def pack(self, weight: Tensor, rows: slice) -> Tensor:
        """Some rows of the packed form of a weight [rows, columns]."""
        flat = weight.detach().reshape(-1)[rows.start * self.values : rows.stop * self.values].float()
        flat = F.pad(flat, (0, (rows.stop - rows.start) * self.values - flat.numel()))
        parts = flat.view(rows.stop - rows.start, self.values)
        return _pack_int8(parts) if self.kind == "int8" else _pack_nf4(parts)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns]."""
        values = _unpack_int8(packed) if self.kind == "int8" else _unpack_nf4(packed, self.group)
        return values.flatten()[: self.rows * self.columns].view(self.rows, self.columns).to(dtype)


def _pack_int8(parts: Tensor) -> Tensor:
    scale = parts.abs().amax(1, keepdim=True) / 127
    codes = (parts / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    return torch.cat([codes.to(torch.int8).view(torch.uint8), scale.contiguous().view(torch.uint8)], 1)


def _unpack_int8(packed: Tensor) -> Tensor:
    scale = _last(packed)
    return packed[:, :-4].contiguous().view(torch.int8).float().mul_(scale)


def _pack_nf4(parts: Tensor) -> Tensor:
    blocks = parts.view(parts.shape[0], -1, BLOCK)
    largest = blocks.abs().amax(2)
    top = largest.amax(1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    scales = (largest / top.clamp(min=tiny) * 255).round().clamp(1, 255).to(torch.uint8)
    levels = _levels(parts.device)
    unit = blocks / _scales(scales, top).clamp(min=tiny).unsqueeze(2)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.cat([pairs.flatten(1), scales, top.contiguous().view(torch.uint8)], 1)


def _unpack_nf4(packed: Tensor, group: int) -> Tensor:
    codes, scales = packed[:, : -group - 4], packed[:, -group - 4 : -4]
    levels = _levels(packed.device)
    pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], 1)  # of every byte: low, then high
    values = F.embedding(codes.int(), pairs).view(packed.shape[0], group, BLOCK)
    return values.mul_(_scales(scales, _last(packed)).unsqueeze(2))


def _levels(device: torch.device) -> Tensor:
    """The 16 values. The copy is queued: ``torch.tensor`` on a device waits for all that it has been given."""
    return torch.tensor(NF4).to(device, non_blocking=True)


def _last(packed: Tensor) -> Tensor:
    """The fp32 value at the end of every row, [rows, 1]."""
    return packed[:, -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)


def _scales(scales: Tensor, top: Tensor) -> Tensor:
    return scales.float() * (top / 255)


class _Product(torch.autograd.Function):
    """x [..., i] times the unpacked weight [o, i], transposed. Keeps the packed weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, how: Packing) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.how = how
        return F.linear(x, how.unpack(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (packed,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return grads[0] @ ctx.how.unpack(packed, grads[0].dtype), None, None, None


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, how: Packing) -> Tensor:
    """``F.linear`` with a packed weight, which like the bias has no gradient."""
    out: Tensor = _Product.apply(x, packed, bias, how)
    return out


def bits_per_weight(how: Packing) -> float:
    """Bits of the packed form for every value of the weight."""
    return 8 * math.prod(how.shape) / (how.rows * how.columns)
