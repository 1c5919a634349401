"""Weights in 4 bits as bitsandbytes stores them (Dettmers et al. 2023, arXiv:2305.14314).

The values of a weight in row order are cut into blocks. A code of 4 bits is an entry of a table (NF4 or FP4), and a
block has one scale. With double quantization a scale is a code of 8 bits: an entry of another table, times the scale of
a block of scales, plus an offset. Block sizes are powers of two, so the number of blocks gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.quantization.packing import levels_by_byte
from shardwise.runtime.quantization.weights import QuantizedWeight

BLOCKS = "weight_blocks"
"""Name of the packed codes."""
_TABLE, _SCALES, _OF_SCALES = "table", "scales", "of_scales"


@dataclass(frozen=True)
class DoubleQuantization:
    """The scales of the scales: the one of block b is ``table[code] * scales[b] + offset``.

    Attributes:
        table: [256], fp32.
        scales: [blocks of scales], fp32.
        offset: [1], fp32.
    """

    table: Tensor
    scales: Tensor
    offset: Tensor


@dataclass(frozen=True)
class BitsAndBytesWeight(QuantizedWeight):
    """A weight [rows, columns] in blocks.

    Attributes:
        packed: uint8 [rows * columns / 2]; the value of even number is in the high half of a byte.
        table: the 16 values of the codes, fp32.
        scales: of the blocks: fp32, or uint8 codes with ``double``.
    """

    rows: int
    columns: int
    packed: Tensor
    table: Tensor
    scales: Tensor
    double: DoubleQuantization | None
    kind = "bitsandbytes' 4 bits"

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def dequantize(self) -> Tensor:
        count = self.rows * self.columns
        scales = self.scales
        if self.double is not None:
            codes = F.embedding(scales.int(), self.double.table.unsqueeze(1)).flatten()
            scales = _scaled(codes, self.double.scales) + self.double.offset
        values = F.embedding(self.packed.int(), levels_by_byte(self.table, high_first=True)).flatten()[:count]
        return _scaled(values, scales).view(self.shape)

    def tensors(self) -> Mapping[str, Tensor]:
        tensors = {BLOCKS: self.packed, f"{BLOCKS}_{_TABLE}": self.table, f"{BLOCKS}_{_SCALES}": self.scales}
        if self.double is None:
            return tensors
        parts = vars(self.double).items()
        return tensors | {f"{BLOCKS}_{_OF_SCALES}_{part}": tensor for part, tensor in parts}


def bitsandbytes_weight_of(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> BitsAndBytesWeight:
    """The weight whose ``tensors()`` these are."""
    start = f"{BLOCKS}_{_OF_SCALES}_"
    parts = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    table, scales = tensors[f"{BLOCKS}_{_TABLE}"], tensors[f"{BLOCKS}_{_SCALES}"]
    double = DoubleQuantization(**parts) if parts else None
    return BitsAndBytesWeight(*shape, tensors[BLOCKS], table, scales, double)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Values [n], each times the scale of its block."""
    count = values.numel()
    block = 1
    while -(-count // block) > scales.numel():
        block *= 2
    padded = F.pad(values, (0, block * scales.numel() - count)).view(-1, block)
    return (padded * scales.unsqueeze(1)).flatten()[:count]
