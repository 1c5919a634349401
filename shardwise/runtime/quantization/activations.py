"""Dynamic 8-bit activations, one scale per token, and the product of a linear layer with 8-bit weights.

A serving engine multiplies 8-bit codes of both sides and scales the sum: y = (codes_x · codes_w) scale_x scale_w.
``QuantizedLinear`` computes the same numbers, so a model is evaluated as it will serve. The sums of int8 products are
exact in int32, and in fp32 as long as they stay below 2^24: up to 1,040 input channels at the largest codes, and with
real data far more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.runtime.quantization.weights import Float8Weight, IntWeight

INT8_LARGEST = 127
FLOAT8_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 codes of activations and their scales: x ≈ codes · scale.

    Args:
        x: [..., in], any float dtype.

    Returns:
        codes [..., in] in int8, -127 to 127, and scale [..., 1] in fp32: the largest magnitude of the token over 127.
    """
    scale = _scale(x, INT8_LARGEST)
    return (x.float() / scale).round_().to(torch.int8), scale


def quantize_tokens_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values of activations [..., in], and scales [..., 1] in fp32: the largest magnitude over 448."""
    scale = _scale(x, FLOAT8_LARGEST)
    return (x.float() / scale).clamp_(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn), scale


class QuantizedLinear(nn.Module):
    """A linear layer with 8-bit weights and activations, for evaluation; it has no gradient.

    Args:
        weight: with symmetric codes and one scale per output channel.
        bias: [out], in any dtype.

    Raises ValueError for a weight with groups or zero points, which 8-bit products do not have.
    """

    def __init__(self, weight: IntWeight | Float8Weight, bias: Tensor | None) -> None:
        super().__init__()
        values = weight.values if isinstance(weight, Float8Weight) else weight.codes
        if isinstance(weight, IntWeight) and (weight.zero is not None or weight.scale.shape[1] != 1):
            raise ValueError("8-bit products take symmetric weights with one scale per output channel")
        self._quantize = quantize_tokens if isinstance(weight, IntWeight) else quantize_tokens_float8
        self.register_buffer("codes", values)
        self.register_buffer("scale", weight.scale.float().squeeze(1))
        self.register_buffer("bias", bias)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's dtype; sums in fp32."""
        codes, scale = self._quantize(x)
        sums = F.linear(codes.float(), self.get_buffer("codes").float())
        product = (sums * scale * self.get_buffer("scale")).to(x.dtype)
        bias = self._buffers["bias"]
        return product if bias is None else product + bias.to(x.dtype)


def _scale(x: Tensor, largest: float) -> Tensor:
    """Largest magnitude of every token over the format's largest number; a token of zeros gets a tiny one."""
    return x.float().abs().amax(-1, keepdim=True).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)
