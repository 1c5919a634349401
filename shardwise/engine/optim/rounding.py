"""Stochastic rounding to bf16: up or down with probabilities that make the mean exact.

Weights that are stored in 16 bits lose every update smaller than half their spacing when they are rounded to
nearest; rounded stochastically they keep it on average (Gupta et al. 2015).

The random bits of an element are a hash of (seed, step, index of the element in the whole parameter). Ranks
that hold the same piece therefore round alike, which a generator per rank would not give, and a run rounds the
same whatever its sharding. The price is a dozen integer operations on int64 per element.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants, signed


def random_bits(index: Tensor, seed: Tensor) -> Tensor:
    """16 random bits per element as int32, from int64 indices and an int64 scalar (splitmix64)."""
    x = (index + seed) * _ODD[0]
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _ODD[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _ODD[2]
    return ((x >> 40) & 0xFFFF).to(torch.int32)


def to_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, rounded away from zero when the dropped 16 bits plus ``bits`` carry.

    Infinities and NaN pass through the plain conversion.
    """
    rounded = ((value.view(torch.int32) + bits) & -65536).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)
