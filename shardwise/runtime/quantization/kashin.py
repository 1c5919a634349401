"""Kashin weights: W = (U + V Q) R with a few values per row in U and in V, and orthogonal Q and R from seeds.

U and V [out, in] have small entries of nearly equal size (Merkulov et al. 2024, arXiv:2404.09737). Each entry of U is
one of the 2^b sums ±c₁±...±c_b, with b peaks c per row (Cherniuk et al. 2026, arXiv:2609.11687), so a code of b bits is
b signs. The second factor V has its own bits and peaks. A weight takes b_u + b_v bits, and 16 for every peak of a row:
2+2 bits are 4 + 64/in bits per weight.

Q and R are maps of matrices (orthogonal.Basis), one-sided or two-sided. The product with an input needs neither the
dense weight nor dense transforms: for one-sided maps, W x = U (R x) + V (Q R x).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.runtime.quantization.orthogonal import TRANSFORMS, Basis, Factor
from shardwise.runtime.quantization.packing import pack_bits, unpack_bits
from shardwise.runtime.quantization.weights import SHAPE, QuantizedWeight
from shardwise.runtime.torch_private import FakeTensor

U, V, FACTORS = "weight_u", "weight_v", "weight_factors"
"""Names of the stored tensors; with ``_peaks`` those of the peaks."""
ONE_SIDED = ((0, 0), (-1, 0), (0, 1), (-1, 0))
"""Kind and seed of Q right and left, R right and left, as they are stored; -1 is no factor."""
STORED_TENSORS = (U, f"{U}_peaks", V, f"{V}_peaks", FACTORS)


@dataclass(frozen=True)
class Codes:
    """A matrix [out, in] with 2^b values per row.

    Attributes:
        codes: [out, in], uint8; the highest of the b bits is the sign of the first peak, 1 for plus.
        peaks: [out, b], fp16.
    """

    codes: Tensor
    peaks: Tensor

    @property
    def width(self) -> int:
        """b, bits per code."""
        return int(self.peaks.shape[1])

    def values(self) -> Tensor:
        """The matrix [out, in], fp32."""
        return kashin_values(self.codes, self.peaks.float())


@dataclass(frozen=True)
class KashinWeight(QuantizedWeight):
    """W = outer(U + inner(V)).

    Attributes:
        u, v: the two factors' codes [out, in].
        inner: the map Q of V; without it the sum of both would be an ordinary grid.
        outer: the map R of the sum; the identity in the papers.
    """

    u: Codes
    v: Codes
    inner: Basis
    outer: Basis

    @property
    def kind(self) -> str:
        return f"kashin{self.u.width + self.v.width}"

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.u.codes.shape[0]), int(self.u.codes.shape[1])

    def dequantize(self) -> Tensor:
        return self.outer(self.u.values() + self.inner(self.v.values()))

    def product(self, x: Tensor) -> Tensor:
        """W x for inputs [..., in]: [..., out], fp32, from the factors."""
        x = _applied(self.outer.right, x.float())
        y = x @ self.u.values().T
        y = y + _applied(self.inner.left, _applied(self.inner.right, x) @ self.v.values().T)
        return _applied(self.outer.left, y)

    def tensors(self) -> Mapping[str, Tensor]:
        stored = {SHAPE: torch.tensor(self.shape)}
        for name, part in ((U, self.u), (V, self.v)):
            stored |= {name: pack_bits(part.codes, part.width), f"{name}_peaks": part.peaks}
        factors = (self.inner.right, self.inner.left, self.outer.right, self.outer.left)
        rows = [
            (-1, 0) if factor is None else (TRANSFORMS.index(factor.kind), factor.seed) for factor in factors
        ]
        return stored | {FACTORS: torch.tensor(rows, dtype=torch.int32)}


def kashin_weight_of(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> KashinWeight:
    """The weight [out, in] whose ``tensors()`` these are."""
    rows, columns = shape
    parts = []
    for name in (U, V):
        peaks = tensors[f"{name}_peaks"]
        parts.append(Codes(unpack_bits(tensors[name], peaks.shape[1], columns), peaks))
    stored = tensors[FACTORS]
    seeds = ONE_SIDED if isinstance(stored, FakeTensor) else stored.tolist()  # a dry run has no values
    factors = [
        None if kind < 0 else Factor(TRANSFORMS[kind], seed, size)
        for (kind, seed), size in zip(seeds, (columns, rows, columns, rows), strict=True)
    ]
    return KashinWeight(parts[0], parts[1], Basis(*factors[:2]), Basis(*factors[2:]))


def kashin_values(codes: Tensor, peaks: Tensor) -> Tensor:
    """±c₁±...±c_b [rows, columns] of codes and peaks [rows, b]."""
    return table_of(peaks).gather(1, codes.long())


def table_of(peaks: Tensor) -> Tensor:
    """The value of every code, [rows, 2^b]."""
    table = torch.zeros_like(peaks[:, :1])
    for peak in peaks.split(1, 1):
        table = torch.stack((table - peak, table + peak), 2).flatten(1)
    return table


def _applied(factor: Factor | None, x: Tensor) -> Tensor:
    return x if factor is None else factor(x)
