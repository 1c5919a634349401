"""LoftQ: an adapter that starts as what quantization takes from its layer (Li et al. 2023, arXiv 2310.08659).

    Q_t = quantize(W - B_t-1 A_t-1)      B_0 A_0 = 0
    B_t A_t = the best approximation of W - Q_t of rank r, with the roots of its singular values in both factors

This is algorithm 1, and PEFT's ``loftq_init``. The layer then holds Q_T instead of quantize(W).

The singular vectors are eigenvectors of the smaller Gram matrix of W - Q_t, in fp64: for a layer [o, i] that takes the
time and memory of min(o, i)², where an SVD takes those of o · i. Their signs are fixed, so that ranks that hold
different rows of A and B agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_RANK_TOLERANCE = 1e-12
"""Of the squares of singular values, relative to the largest: below it, fp32 rounding."""


def loftq(
    weight: Tensor, rounded: Callable[[Tensor], Tensor], rank: int, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a weight [o, i] to quantize, B [o, r] and A [r, i].

    Args:
        rounded: quantizes a weight [o, i] and dequantizes it.
        iterations: T, at least 1.
    """
    rest = weight
    b, a = principal(weight - rounded(rest), rank)
    for _ in range(iterations - 1):
        rest = torch.addmm(weight, b, a, alpha=-1)
        b, a = principal(weight - rounded(rest), rank)
    return rest, b, a


def principal(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [o, r] and A [r, i] with the best approximation B A of a matrix [o, i].

    Rows of A and columns of B beyond the rank of the matrix are zero.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.t() if tall else matrix).double()  # [short, long]
    values, vectors = torch.linalg.eigh(wide @ wide.t())
    # eigh returns ascending eigenvalues; the largest come first here.
    values = values[-rank:].flip(0)
    vectors = vectors[:, -rank:].flip(1)
    # An eigenvector's sign is arbitrary: its largest entry becomes positive.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    roots = values.clamp(min=0) ** 0.25  # of the singular values, whose squares are the eigenvalues
    is_significant = values > _RANK_TOLERANCE * values[:1]
    vectors = vectors * (largest.sign() * is_significant)
    # With wide = U S V', the factors are U √S and √S V' = (U / √S)' wide, so V is never computed.
    short = vectors * roots  # [short, r]
    long = (vectors / torch.where(is_significant, roots, 1.0)).t() @ wide  # [r, long]
    b, a = (long.t(), short.t()) if tall else (short, long)
    missing = rank - len(values)  # of a rank above the short side
    return F.pad(b.to(matrix.dtype), (0, missing)), F.pad(a.to(matrix.dtype), (0, 0, 0, missing))
