"""The result of quantizing one weight [out, in]: what a method returns, what a folder stores, what a layer multiplies.

A method (plugins/quantize/methods) returns one of these classes. ``tensors()`` has the stored tensors, by the suffix
names of the format; ``dequantize()`` is the weight that the model then has. Methods compare errors with
``dequantize()`` and never with numbers that are not stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.quantization.packing import levels_by_byte, to_words
from shardwise.runtime.quantized import Packing

PACKED, SCALE, ZERO, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
"""Names of stored tensors next to a layer's other tensors, as in compressed-tensors."""
COLUMN_GROUPS = "weight_g_idx"
"""Name of the groups of input channels, where they are not consecutive."""
NF4 = "weight_nf4"
"""Name of packed NF4, for which compressed-tensors has no format."""
FP4 = "weight_fp4"
"""Name of packed e2m1 values."""
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of e2m1 by code (Open Compute Project 2023, Microscaling Formats 1.0, table 5)."""


class QuantizedWeight(ABC):
    """A weight [out, in] in few bits. ``width``: bits per integer code, 8 for codes of other kinds."""

    width: int = 8

    @property
    @abstractmethod
    def kind(self) -> str:
        """The format in words, such as ``int4``."""

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
        group_of: [in], int32: the group of each input channel, as GPTQ with act-order stores it; None if groups are
            consecutive.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    width: int
    activation_bits: int = 16
    group_of: Tensor | None = None

    @property
    def kind(self) -> str:
        return f"int{self.width}"

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    def dequantize(self) -> Tensor:
        rows, columns = self.shape
        if self.group_of is not None:
            zero = 0.0 if self.zero is None else self.zero.float()[:, self.group_of]
            return (self.codes.float() - zero) * self.scale.float()[:, self.group_of]
        codes = self.codes.reshape(rows, self.scale.shape[1], -1).float()
        if self.zero is not None:
            codes = codes - self.zero.float().unsqueeze(2)
        return (codes * self.scale.float().unsqueeze(2)).view(rows, columns)

    def tensors(self) -> Mapping[str, Tensor]:
        whole = self.activation_bits == 8
        tensors = {"weight": self.codes} if whole else {PACKED: to_words(self.codes, self.width)}
        tensors[SCALE] = self.scale
        if not whole:
            tensors[SHAPE] = torch.tensor(self.shape)
        if self.zero is not None:
            tensors[ZERO] = self.zero if whole else to_words(self.zero.t(), self.width).t().contiguous()
        if self.group_of is not None:
            tensors[COLUMN_GROUPS] = self.group_of
        return tensors


@dataclass(frozen=True)
class Float8Weight(QuantizedWeight):
    """e4m3 values with one scale per output channel: weight = value * scale (Micikevicius et al. 2022, 2209.05433).

    Attributes:
        values: [out, in], float8_e4m3fn.
        scale: [out, groups] in the dtype that is stored; one group is a scale per channel.
    """

    values: Tensor
    scale: Tensor
    kind = "fp8"

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.values.shape[0]), int(self.values.shape[1])

    def dequantize(self) -> Tensor:
        rows, columns = self.shape
        values = self.values.float().view(rows, self.scale.shape[1], -1)
        return (values * self.scale.float().unsqueeze(2)).view(rows, columns)

    def tensors(self) -> Mapping[str, Tensor]:
        return {"weight": self.values, SCALE: self.scale}


@dataclass(frozen=True)
class Float4Weight(QuantizedWeight):
    """e2m1 values with one scale per group of columns, such as MXFP4 (Rouhani et al. 2023, arXiv:2310.10537).

    Attributes:
        packed: [out, in / 2], uint8; the even column is in the low half of a byte.
        scale: [out, groups], float8_e8m0fnu: powers of two.
    """

    packed: Tensor
    scale: Tensor
    kind = "fp4"

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.packed.shape[0]), 2 * int(self.packed.shape[1])

    def dequantize(self) -> Tensor:
        levels = torch.tensor(FP4_LEVELS).to(self.packed.device, non_blocking=True)
        values = F.embedding(self.packed.int(), levels_by_byte(levels)).view(*self.scale.shape, -1)
        return values.mul_(self.scale.float().unsqueeze(2)).view(self.shape)

    def tensors(self) -> Mapping[str, Tensor]:
        return {FP4: self.packed, SCALE: self.scale}


@dataclass(frozen=True)
class NF4Weight(QuantizedWeight):
    """The 16 levels of NF4 with double quantization, 4.127 bits per weight (Dettmers et al. 2023, 2305.14314).

    Attributes:
        packed: uint8 rows of codes, scales and their maximum, as runtime/quantized.py packs them.
        how: the packing, which knows (out, in).
    """

    packed: Tensor
    how: Packing
    kind = "nf4"

    @property
    def shape(self) -> tuple[int, int]:
        return self.how.rows, self.how.columns

    def dequantize(self) -> Tensor:
        return self.how.unpack(self.packed, torch.float32)

    def tensors(self) -> Mapping[str, Tensor]:
        return {NF4: self.packed, SHAPE: torch.tensor(self.shape)}
