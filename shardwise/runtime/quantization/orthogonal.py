"""Fast random orthogonal transforms that are stored as a seed: P = Tᵀ diag(±1) T with the DCT or the Hadamard matrix.

P is symmetric and its own inverse, so one function applies it in both directions. It costs two fast transforms,
O(n log n) per vector. The DCT takes any n (Makhoul 1980, one FFT of length n); the Hadamard matrix takes powers of two.

The shorter form T diag(±1) maps a single large weight to a regular pattern, in which Kashin's expansion (see
plugins/quantize/methods/expansion.py) stalls; P maps it to noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shardwise.runtime.quantization.hadamard import walsh_hadamard

TRANSFORMS = ("dct", "hadamard")
"""Transforms, by the number that is stored."""


@dataclass(frozen=True)
class Factor:
    """The orthogonal matrix P = Tᵀ diag(±1) T [size, size].

    Attributes:
        kind: dct or hadamard.
        seed: of the signs.
        size: n. Raises ValueError for hadamard unless it is a power of two.
    """

    kind: str
    seed: int
    size: int

    def __post_init__(self) -> None:
        if self.kind not in TRANSFORMS:
            raise ValueError(f"no transform is called {self.kind}")
        if self.kind == "hadamard" and self.size & (self.size - 1):
            raise ValueError(f"the Hadamard transform needs a power of two, not {self.size}")

    def __call__(self, x: Tensor) -> Tensor:
        """P x along the last dimension of x [..., size], fp32 or fp64."""
        signs = random_signs(self.seed, self.size).to(x)
        if self.kind == "hadamard":
            return walsh_hadamard(walsh_hadamard(x) * signs)
        return inverse_dct(dct(x) * signs)


@dataclass(frozen=True)
class Basis:
    """The map X -> L X R of matrices [out, in], its own inverse. A missing factor is the identity.

    As a matrix on vec(X) this is the Kronecker product of R and L.
    """

    right: Factor | None = None
    left: Factor | None = None

    def __call__(self, matrix: Tensor) -> Tensor:
        if self.right is not None:
            matrix = self.right(matrix)
        return matrix if self.left is None else self.left(matrix.mT).mT


def random_signs(seed: int, size: int) -> Tensor:
    """Signs ±1 [size], fp32, as many of each as possible: with unequal numbers P has more of the identity in it.

    They are the order of PCG64's raw numbers, which numpy keeps the same in all versions.
    """
    return torch.tensor(_signs(seed, size))


# Caches hold arrays, since a tensor may be fake: a prediction runs before the pass in one process.
@lru_cache(maxsize=64)
def _signs(seed: int, size: int) -> np.ndarray:
    raw = np.random.PCG64(seed).random_raw(size)
    signs = np.ones(size, dtype=np.float32)
    signs[np.argsort(raw, kind="stable")[: size // 2]] = -1
    return signs


def dct(x: Tensor) -> Tensor:
    """The orthonormal DCT-II along the last dimension, by one FFT of the even values and the reversed odd ones."""
    size = x.shape[-1]
    half = torch.fft.rfft(torch.cat((x[..., ::2], x[..., 1::2].flip(-1)), -1)) * _twiddle(size, x.dtype).to(
        x.device
    )
    return torch.cat((half.real, -half.imag[..., 1 : (size + 1) // 2].flip(-1)), -1)


def inverse_dct(x: Tensor) -> Tensor:
    """The inverse, the orthonormal DCT-III."""
    size = x.shape[-1]
    reversed_ = torch.cat((torch.zeros_like(x[..., :1]), -x[..., size - size // 2 :].flip(-1)), -1)
    half = torch.complex(x[..., : size // 2 + 1].contiguous(), reversed_) / _twiddle(size, x.dtype).to(
        x.device
    )
    mixed = torch.fft.irfft(half, size)
    middle = (size + 1) // 2
    restored = torch.empty_like(x)
    restored[..., ::2], restored[..., 1::2] = mixed[..., :middle], mixed[..., middle:].flip(-1)
    return restored


def _twiddle(size: int, dtype: torch.dtype) -> Tensor:
    """sqrt(2/n) exp(-iπk/2n) for k = 0..n/2, the first divided by sqrt(2)."""
    return torch.tensor(_twiddles(size)).to(dtype.to_complex())


@lru_cache(maxsize=64)
def _twiddles(size: int) -> np.ndarray:
    frequencies = np.arange(size // 2 + 1)
    scale = np.full(frequencies.shape, math.sqrt(2 / size))
    scale[0] = math.sqrt(1 / size)
    return scale * np.exp(-1j * math.pi * frequencies / (2 * size))
