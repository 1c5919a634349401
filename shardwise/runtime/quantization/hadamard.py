"""Orthogonal transforms in O(n log n): a Hadamard matrix with random signs, for any size.

Size n = m 2^k. The matrix is Q = D (M ⊗ H): random signs D, a small orthogonal M [m, m], and Sylvester's Hadamard
matrix H of order 2^k by the fast Walsh-Hadamard transform. M is, in this order of preference:

    nothing (m = 1)                       n a power of two
    a Hadamard matrix of order m          Paley's constructions 1 and 2 for primes: 12, 20, 24, 28, 36, 44, 60, ...
    a random orthogonal block of odd m    all other sizes; its entries are not all ±1/√m, so outliers spread less evenly

Everything follows from the size and the seed, so a file stores two numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SYLVESTER_ORDER = 64
"""Order of the factors of Sylvester's matrix that are multiplied at once."""
LARGEST_FACTOR = 256
"""The largest order of a Hadamard factor; larger ones cost more than they spread."""


@dataclass(frozen=True)
class RandomHadamard:
    """An orthogonal matrix Q [size, size] with random signs. ``seed`` chooses the signs, and the block of odd sizes."""

    size: int
    seed: int

    def apply(self, x: Tensor) -> Tensor:
        """x Q for x [..., size], in x's dtype."""
        return self._mixed(x * self._signs(x), self._factor)

    def inverse(self, x: Tensor) -> Tensor:
        """x Qᵀ for x [..., size], in x's dtype; undoes ``apply``."""
        return self._mixed(x, self._factor.T) * self._signs(x)

    def _mixed(self, x: Tensor, factor: Tensor) -> Tensor:
        """x (M ⊗ H) for a factor M; H is symmetric."""
        count = factor.shape[0]
        parts = walsh_hadamard(x.unflatten(-1, (count, self.size // count)))
        if count > 1:
            parts = torch.einsum("...mk,mn->...nk", parts, factor.to(parts))
        return parts.flatten(-2)

    def _signs(self, like: Tensor) -> Tensor:
        return (1 - 2 * torch.randint(0, 2, (self.size,), generator=self._generator())).to(like)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @cached_property
    def _factor(self) -> Tensor:
        """M [m, m] in fp64."""
        odd = self.size
        while odd % 2 == 0:
            odd //= 2
        if odd == 1:
            return torch.ones(1, 1, dtype=torch.float64)
        # Every Hadamard matrix larger than 2 has an order that is a multiple of 4.
        order = odd * 4
        while order <= LARGEST_FACTOR and self.size % order == 0:
            matrix = hadamard_matrix(order)
            if matrix is not None:
                return matrix / math.sqrt(order)
            order *= 2
        return random_orthogonal(odd, self.seed)


def walsh_hadamard(x: Tensor) -> Tensor:
    """x H for the last axis, whose size is a power of two; H is orthogonal, symmetric and of entries ±1/√n.

    H is a Kronecker product of factors of at most 64, each one matrix product: about 10 n log₂ n multiplications,
    and far fewer passes through memory than with factors of 2.
    """
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"{size} is no power of two")
    inner = min(size, SYLVESTER_ORDER)
    x = x.unflatten(-1, (-1, inner)) @ _sylvester(inner).to(x)  # [..., size / inner, inner]
    while inner < size:
        count = min(SYLVESTER_ORDER, size // inner)
        x = _sylvester(count).to(x) @ x.flatten(-2).unflatten(-1, (-1, count, inner))
        x = x.flatten(-3, -2)
        inner *= count
        x = x.flatten(-2).unflatten(-1, (-1, inner))
    return x.flatten(-2)


def _sylvester(order: int) -> Tensor:
    """Sylvester's Hadamard matrix of a power of two, orthogonal, in fp64. Not cached: it may be a fake tensor."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    return torch.kron(two, _sylvester(order // 2))


def random_orthogonal(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix [size, size] in fp64: Q of a normal matrix, uniform by the signs of R's diagonal."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def hadamard_matrix(order: int) -> Tensor | None:
    """A Hadamard matrix of entries ±1 in fp64, by Paley's constructions for primes; None where neither has one.

    Source: Paley 1933, "On orthogonal matrices". With the Jacobsthal matrix J of a prime q, J[a, b] = (a - b over q):
    order q + 1 for q = 3 mod 4 from I + [[0, 1], [-1, J]], order 2(q + 1) for q = 1 mod 4 from [[0, 1], [1, J]], whose
    zeros become [[1, -1], [-1, -1]] and whose ±1 become ±[[1, 1], [1, -1]].
    """
    # order % 4 == 0 makes q = order - 1 a prime of 3 mod 4.
    if order % 4 == 0 and _is_prime(order - 1):
        matrix = _bordered(order - 1, -1)
        return matrix + torch.eye(order, dtype=torch.float64)
    half = order // 2
    if order % 4 == 0 and (half - 1) % 4 == 1 and _is_prime(half - 1):
        entries = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        zeros = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        identity = torch.eye(half, dtype=torch.float64)
        return torch.kron(_bordered(half - 1, 1), entries) + torch.kron(identity, zeros)
    return None


def _bordered(prime: int, sign: int) -> Tensor:
    """The Jacobsthal matrix with a first row of 1 and a first column of ``sign``; zeros on the diagonal."""
    squares = {value * value % prime for value in range(1, prime)}
    character = [0.0] + [1.0 if value in squares else -1.0 for value in range(1, prime)]
    index = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1, sign
    matrix[1:, 1:] = torch.tensor(character, dtype=torch.float64)[(index[:, None] - index) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
