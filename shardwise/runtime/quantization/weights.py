"""The result of quantizing one weight [out, in]: what a method returns, what a folder stores, what a layer multiplies.

A method (quantize/methods) returns one of these classes. ``tensors()`` has the stored tensors, by the suffix names of
the format; ``dequantize()`` is the weight that the model then has. Methods compare errors with ``dequantize()`` and
never with numbers that are not stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.runtime.quantization.packing import from_words, to_words
from shardwise.runtime.quantized import Packing

PACKED, SCALE, ZERO, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
"""Names of stored tensors next to a layer's other tensors, as in compressed-tensors."""
NF4 = "weight_nf4"
"""Name of packed NF4, for which compressed-tensors has no format."""


class QuantizedWeight(ABC):
    """A weight [out, in] in few bits."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The weight [out, in] in fp32, exactly as a reader of ``tensors()`` computes it."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Stored tensors by suffix, such as ``weight_packed`` and ``weight_scale``."""

    @property
    def bits(self) -> float:
        """Stored bits per weight: codes, scales, zero points and tables."""
        tensors = {suffix: tensor for suffix, tensor in self.tensors().items() if suffix != SHAPE}
        stored = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        return 8 * stored / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class IntWeight(QuantizedWeight):
    """Uniform levels: weight = (code - zero) * scale.

    Attributes:
        codes: [out, in], int8. Symmetric codes lie in [-2^(b-1), 2^(b-1) - 1], asymmetric ones in the same range,
            with the zero point shifted alike (compressed-tensors stores signed values).
        scale: [out, groups] in the dtype that is stored (fp32, bf16 or fp16); one group is a scale per channel.
        zero: [out, groups], int8, or None for symmetric codes.
        width: bits per code, 2 to 8.
        activation_bits: of the scheme; 8 stores whole bytes (``int-quantized``), 16 packs (``pack-quantized``).
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    width: int
    activation_bits: int = 16

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    def dequantize(self) -> Tensor:
        rows, columns = self.shape
        groups = self.scale.shape[1]
        codes = self.codes.view(rows, groups, columns // groups).float()
        if self.zero is not None:
            codes = codes - self.zero.float().unsqueeze(2)
        return (codes * self.scale.float().unsqueeze(2)).view(rows, columns)

    def tensors(self) -> Mapping[str, Tensor]:
        if self.activation_bits == 8:
            zero = {} if self.zero is None else {ZERO: self.zero}
            return {"weight": self.codes, SCALE: self.scale, **zero}
        packed = {
            PACKED: to_words(self.codes, self.width),
            SCALE: self.scale,
            SHAPE: torch.tensor(self.shape),
        }
        if self.zero is None:
            return packed
        return {**packed, ZERO: to_words(self.zero.t(), self.width).t().contiguous()}


@dataclass(frozen=True)
class Float8Weight(QuantizedWeight):
    """e4m3 values with one scale per output channel: weight = value * scale (Micikevicius et al. 2022, 2209.05433).

    Attributes:
        values: [out, in], float8_e4m3fn.
        scale: [out, 1] in the dtype that is stored.
    """

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.values.shape[0]), int(self.values.shape[1])

    def dequantize(self) -> Tensor:
        return self.values.float() * self.scale.float()

    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.values, SCALE: self.scale}


@dataclass(frozen=True)
class NF4Weight(QuantizedWeight):
    """The 16 levels of NF4 with double quantization, 4.127 bits per weight (Dettmers et al. 2023, 2305.14314).

    Attributes:
        packed: uint8 rows of codes, scales and their maximum, as runtime/quantized.py packs them.
        how: the packing, which knows (out, in).
    """

    packed: Tensor
    how: Packing

    @property
    def shape(self) -> tuple[int, int]:
        return self.how.rows, self.how.columns

    def dequantize(self) -> Tensor:
        return self.how.unpack(self.packed, torch.float32)

    def tensors(self) -> Mapping[str, Tensor]:
        return {NF4: self.packed, SHAPE: torch.tensor(self.shape)}


def weight_of(tensors: Mapping[str, Tensor], width: int) -> QuantizedWeight:
    """The weight whose ``tensors()`` these are. ``width``: bits per code of integer codes."""
    if NF4 in tensors:
        return NF4Weight(tensors[NF4], Packing("nf4", *tensors[SHAPE].tolist()))
    scale, zero = tensors[SCALE], tensors.get(ZERO)
    if PACKED in tensors:
        rows, columns = tensors[SHAPE].tolist()
        zero = None if zero is None else from_words(zero.t(), width, rows).t().contiguous()
        return IntWeight(from_words(tensors[PACKED], width, columns), scale, zero, width)
    codes = tensors["weight"]
    if codes.dtype == torch.float8_e4m3fn:
        return Float8Weight(codes, scale)
    return IntWeight(codes, scale, zero, width, activation_bits=8)
