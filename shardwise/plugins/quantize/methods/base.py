"""What a quantization method is given and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardwise.core.scheme import Scheme
from shardwise.runtime.quantization.weights import QuantizedWeight


@dataclass(frozen=True)
class InputStatistics:
    """Sums over the calibration tokens that one linear layer reads.

    Attributes:
        hessian: [in, in], fp32: the mean of x xᵀ over tokens (times 2 is the Hessian of the squared output error).
        magnitude: [in], fp32: the mean of |x| per input channel (AWQ's scale).
        tokens: number of tokens.
    """

    hessian: Tensor
    magnitude: Tensor
    tokens: int

    def divided(self, scale: Tensor) -> InputStatistics:
        """The statistics of inputs that are divided by a scale [in] per channel."""
        return InputStatistics(self.hessian / torch.outer(scale, scale), self.magnitude / scale, self.tokens)


class QuantizationMethod(ABC):
    """Quantizes one weight [out, in]. A method holds its settings and no state."""

    name: ClassVar[str]
    calibrated: ClassVar[bool] = False
    """Whether the method needs ``InputStatistics``."""
    folds: ClassVar[bool] = False
    """Whether ``prepare`` may change weights."""

    def prepare(
        self, block: nn.Module, statistics: MutableMapping[str, InputStatistics], scheme: Scheme
    ) -> Sequence[str]:
        """Change the weights of a block, but not its output, before its layers are quantized.

        Args:
            block: with weights in fp32.
            statistics: by name of the layer within the block; replaced for layers whose inputs change.

        Returns:
            Names within the block of the modules that were changed.
        """
        return ()

    def channel_scale(self, weight: Tensor, statistics: InputStatistics, scheme: Scheme) -> Tensor | None:
        """The scale [in] of the input of a weight [out, in] whose rounding loses least; None for a method without.

        Raises NotConverged as ``quantize``.
        """
        return None

    @abstractmethod
    def quantize(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics | None) -> QuantizedWeight:
        """Quantize a weight [out, in] of any float dtype.

        Raises NotConverged when the layer should stay in 16 bits.
        """

    def without_zero_points(self) -> QuantizationMethod:
        """The method with symmetric levels, for weights whose readers know no zero points."""
        return self

    def rehearsal(self) -> QuantizationMethod:
        """A method with the same peak memory and fewer operations: a prediction runs it on fake tensors."""
        return self


class NotConverged(Exception):
    """A weight that the method cannot represent; the layer stays in 16 bits and is reported."""


def relative_output_error(weight: Tensor, rounded: Tensor, statistics: InputStatistics | None) -> float:
    """‖(W - Ŵ) X‖ / ‖W X‖ over the calibration tokens; of the weights themselves without statistics."""
    weight = weight.float()
    difference = weight - rounded.float()
    if statistics is None:
        return float(difference.norm() / weight.norm().clamp(min=1e-30))
    # ‖A X‖² = tr(A H Aᵀ), up to the number of tokens, which cancels. Rounding may make a small trace negative.
    lost, whole = (
        (matrix @ statistics.hessian * matrix).sum().clamp(min=0) for matrix in (difference, weight)
    )
    return float((lost / whole.clamp(min=1e-30)).sqrt())
