"""Stochastic rounding to bf16: up or down with probabilities that keep the mean exact.

Rounding to nearest loses every update smaller than half the spacing of 16-bit weights. Stochastic rounding keeps it on
average (Gupta et al. 2015).

The random bits of an element are a hash of (seed, row and column in the whole parameter). So ranks with the same shard
round alike, and the result does not depend on the sharding; a generator per rank would give neither. Rows and columns
are hashed in 64 bits, since they are few. For each element the two keys are combined and mixed in 32 bits, in place. On
a CPU this is seven times as fast as a 64-bit hash of every element; two elements in 2^32 pairs share their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants, signed
_MIX = (-2048144789, -1028477387)  # murmur3's finalizer's, signed


Keys = tuple[Tensor, Tensor]
"""int32 [r, 1] and [c]: hashes of the rows and of the columns of a parameter."""


def position_keys(rows: Tensor, columns: Tensor, seed: Tensor) -> Keys:
    """Keys of positions in the whole parameter: int64 [r] and [c], with an int64 scalar."""
    # Even and odd numbers: a row and a column of one parameter never hash the same one.
    return _splitmix64(2 * rows + seed)[:, None], _splitmix64(2 * columns + 1 + seed)


def random_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """16 random bits per element as int32 [r, c], from the keys of its row and of its column."""
    x = rows ^ columns
    shifted = x.mul_(_MIX[0]) >> 13
    x.bitwise_xor_(shifted).mul_(_MIX[1])
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted))
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFF)


def _splitmix64(x: Tensor) -> Tensor:
    """32 bits of splitmix64's output function, as int32."""
    # PyTorch shifts int64 arithmetically. The masks take the copies of the sign bit away.
    x = x * _ODD[0]
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _ODD[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _ODD[2]
    return (x >> 32).to(torch.int32)


def to_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, rounded away from zero if the dropped 16 bits plus ``bits`` (consumed) carry.

    Infinities have no bits to drop. NaN passes through the plain conversion.
    """
    # -65536 keeps the upper 16 bits.
    rounded = bits.add_(value.view(torch.int32)).bitwise_and_(-65536).view(torch.float32)
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)
