"""How a pass rounds one weight: by its method, or, for an expert that no token reached, to nearest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.base import (
    InputStatistics,
    NotConverged,
    QuantizationMethod,
    relative_output_error,
)
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.plugins.quantize.state import UNQUANTIZED, LayerRow, stored_form
from shardwise.runtime.quantization.weights import PACKED, ZERO

Rounded = tuple[LayerRow, Mapping[str, Tensor] | None]
"""The row of a weight, and its stored tensors by suffix unless it is kept."""


@dataclass(frozen=True)
class Quantizer:
    """Quantizes every matrix alike.

    Attributes:
        dtypes: those of the written folder, by name of the model's tensor.
        least_tokens: those that a calibrated method needs for an expert; 0 in a rehearsal, whose experts have none.
    """

    method: QuantizationMethod
    scheme: Scheme
    dtypes: Mapping[str, torch.dtype]
    least_tokens: int = 1

    def of_experts(self) -> Quantizer:
        """That of experts: transformers dequantizes them while it loads, and reads no zero points and no whole int8."""
        scheme = self.scheme
        if scheme.kind == "int":
            scheme = replace(scheme, activation_bits=16)
        return replace(self, method=self.method.without_zero_points(), scheme=scheme)

    def layer(self, name: str, weight: Tensor, statistics: InputStatistics | None) -> Rounded:
        """Quantize a linear layer's weight [out, in]; one that no calibration token reached is kept."""
        stored = self.dtypes[f"{name}.weight"]
        if statistics is None and self.method.calibrated:
            return _kept(name, weight, stored, "no calibration token reaches it")
        return self._rounded(self.method, name, weight, stored, statistics)

    def expert(self, name: str, stack: str, weight: Tensor, statistics: InputStatistics | None) -> Rounded:
        """Quantize a matrix [out, in] of an expert; to nearest if no token reached it or the method has no result.

        Args:
            stack: name of the model's tensor that the matrix is a part of.
        """
        tokens = None if statistics is None else statistics.tokens
        stored = self.dtypes[stack]
        if tokens is None or tokens < self.least_tokens:
            statistics = None
        methods: list[QuantizationMethod] = [self.method, RoundToNearest()]
        if statistics is None and self.method.calibrated:
            methods = [RoundToNearest()]
        for method in methods:
            row, tensors = self._rounded(method, name, weight, stored, statistics)
            if tensors is not None:
                break
        return replace(row, stack=stack, tokens=tokens), tensors

    def scale_of(self, weight: Tensor, statistics: InputStatistics | None) -> Tensor | None:
        """The scale [in] of the input of an expert's matrix [out, in]; None without one."""
        if statistics is None or statistics.tokens < self.least_tokens:
            return None
        try:
            return self.method.channel_scale(weight, statistics, self.scheme)
        except NotConverged:
            return None

    def _rounded(
        self,
        method: QuantizationMethod,
        name: str,
        weight: Tensor,
        stored: torch.dtype,
        statistics: InputStatistics | None,
    ) -> Rounded:
        try:
            # In the stored dtype, from which a method takes the dtype of its scales.
            result = method.quantize(weight.to(stored), self.scheme, statistics)
            tensors = _stored_tensors(result.tensors())
        except NotConverged as reason:
            return _kept(name, weight, stored, str(reason) or "it does not converge")
        error = relative_output_error(weight, result.dequantize(), statistics)
        form = stored_form(tensors)
        return LayerRow(name, _shape(weight), method.name, error, result.bits, tensors=form), tensors


def _kept(name: str, weight: Tensor, stored: torch.dtype, why: str) -> Rounded:
    """The report row of a weight that stays in its dtype. Its scales would have the same dtype."""
    return LayerRow(name, _shape(weight), UNQUANTIZED, 0.0, 8.0 * stored.itemsize, why), None


def _shape(weight: Tensor) -> tuple[int, int]:
    return int(weight.shape[0]), int(weight.shape[1])


def _stored_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The stored tensors. Raises NotConverged for zero points of several groups in one row of words.

    compressed-tensors up to 0.20 fails to unpack them: their transpose counts as contiguous, with a stride of 2.
    """
    zero = tensors.get(ZERO)
    if zero is not None and PACKED in tensors and zero.shape[0] == 1 < zero.shape[1]:
        raise NotConverged("compressed-tensors cannot read zero points of so few output channels")
    return tensors
