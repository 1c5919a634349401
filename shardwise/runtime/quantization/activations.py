"""Dynamic 8-bit activations, as compressed-tensors rounds them when transformers runs a quantized model.

    int       codes -128 to 127;  scale = largest magnitude / 127.5
    float8    values of e4m3;     scale = largest magnitude / 448

There is one scale for each index of the first two dimensions. So every token of [b, s, in] has its own scale, a matrix
[t, in] has one, and of [b, heads, s, in] every head has one. vLLM's kernel for int8 (dynamic_scaled_int8_quant) divides
by 127 instead, and every row has its own scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_STEPS = 127.5
"""Half of the 255 steps between the codes -128 and 127."""
FLOAT8_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded_to_int8(x: Tensor) -> Tensor:
    """Activations [..., in] of any float dtype, rounded to int8 codes times a scale; in their dtype."""
    scale = _largest_magnitude(x).div_(INT8_STEPS)
    return (x.float() / scale).clamp_(-128, 127).round_().mul_(scale).to(x.dtype)


def rounded_to_float8(x: Tensor) -> Tensor:
    """Activations [..., in] of any float dtype, rounded to e4m3 values times a scale; in their dtype."""
    scale = _largest_magnitude(x).div_(FLOAT8_LARGEST)
    values = (x.float() / scale).clamp_(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn)
    return values.float().mul_(scale).to(x.dtype)


def _largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude that shares a scale, in fp32, with as many dimensions as x; tiny where all are zero."""
    among = tuple(range(2, x.dim())) or tuple(range(x.dim()))
    # Divided by 127.5 or 448 this is still a normal number: a subnormal scale would lose digits, and 0 gives NaN.
    return x.float().abs().amax(among, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * 512)
