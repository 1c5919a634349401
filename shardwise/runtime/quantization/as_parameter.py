"""A quantized weight as one uint8 parameter that FSDP2 can shard by rows, such as the frozen weights of QLoRA.

The stored tensors of a ``QuantizedWeight`` follow one another, each from a multiple of 16 bytes on. The bytes are cut
into as many rows as the weight has. A product needs the whole weight, so a rank unpacks it after the all-gather; a part
of the rows has no meaning of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.quantization.stored import weight_of
from shardwise.runtime.quantization.weights import SHAPE, QuantizedWeight

# Bytes. A view as another dtype must begin at a multiple of its item size.
_ALIGNED = 16
StoredForm = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a stored tensor."""


class _StoredRange(NamedTuple):
    """The bytes of one tensor in the parameter, from ``start`` to before ``stop``."""

    suffix: str
    start: int
    stop: int
    form: StoredForm


@dataclass(frozen=True)
class StoredPacking:
    """The stored format of a weight [rows, columns], packed into one parameter.

    Attributes:
        kind: the format in words, such as ``int4``.
        width: bits per code of integer codes.
        forms: shape and dtype of each stored tensor, by suffix, in order.
    """

    kind: str
    rows: int
    columns: int
    width: int
    forms: tuple[tuple[str, StoredForm], ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the parameter, in bytes."""
        return self.rows, -(-self._end // self.rows)

    @property
    def _end(self) -> int:
        return max(stored.stop for stored in self._ranges())

    def _ranges(self) -> Iterator[_StoredRange]:
        start = 0
        for suffix, (shape, dtype) in self.forms:
            stop = start + math.prod(shape) * dtype.itemsize
            yield _StoredRange(suffix, start, stop, (shape, dtype))
            start = -(-stop // _ALIGNED) * _ALIGNED

    def pack_stored(self, weight: QuantizedWeight) -> Tensor:
        """The whole parameter."""
        tensors = weight.tensors()
        parts = []
        end = 0
        for stored in self._ranges():
            data = tensors[stored.suffix].contiguous().reshape(-1).view(torch.uint8)
            parts.append(F.pad(data, (stored.start - end, 0)))
            end = stored.stop
        whole = torch.cat(parts)
        return F.pad(whole, (0, math.prod(self.shape) - end)).view(self.shape)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns]."""
        flat = packed.reshape(-1)
        tensors = {}
        for stored in self._ranges():
            shape, dtype_of_part = stored.form
            tensors[stored.suffix] = flat[stored.start : stored.stop].view(dtype_of_part).view(shape)
        return weight_of(tensors, self.width, (self.rows, self.columns)).dequantize().to(dtype)


def stored_packing(
    kind: str, width: int, shape: tuple[int, int], forms: Mapping[str, StoredForm]
) -> StoredPacking:
    """The packing of stored tensors with these forms by suffix; ``weight_shape`` is left out."""
    kept = tuple((suffix, form) for suffix, form in forms.items() if suffix != SHAPE)
    return StoredPacking(kind, *shape, width, kept)
