"""Fast transforms against their matrices; Kashin weights: codes and folders round-trip, products from the factors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardwise.runtime.quantization.kashin import Codes, KashinWeight, kashin_weight_of, table_of
from shardwise.runtime.quantization.orthogonal import Basis, Factor, dct, inverse_dct, random_signs
from shardwise.runtime.torch_private import FakeTensorMode


def dct_matrix(size: int) -> Tensor:
    """The DCT-II by its definition."""
    row, column = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi * (2 * column + 1) * row / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


@pytest.mark.parametrize("size", [1, 2, 7, 12, 33, 96])
def test_dct_and_its_inverse_equal_the_matrix(size: int) -> None:
    x = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(dct(x), x @ dct_matrix(size).T)
    torch.testing.assert_close(inverse_dct(x), x @ dct_matrix(size))


@pytest.mark.parametrize(("kind", "size"), [("dct", 45), ("hadamard", 64)])
def test_a_factor_is_orthogonal_and_its_own_inverse(kind: str, size: int) -> None:
    matrix = Factor(kind, 3, size)(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.T)
    assert matrix.abs().max() < 6 / math.sqrt(size) and not matrix.equal(
        Factor(kind, 4, size)(torch.eye(size))
    )


def test_signs_of_a_seed_never_change() -> None:
    """A stored folder has the seed only."""
    assert random_signs(5, 12).tolist() == [1, 1, 1, -1, -1, -1, 1, -1, -1, 1, 1, -1]


def test_fake_tensors_leave_nothing_behind() -> None:
    """A prediction transforms fake tensors before the same process transforms real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inverse_dct(dct(torch.empty(2, 26)) * random_signs(9, 26))
    x = torch.randn(3, 26, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(inverse_dct(dct(x)), x, atol=1e-5)
    assert type(random_signs(9, 26)) is torch.Tensor


def test_a_two_sided_basis_is_the_kronecker_product() -> None:
    basis = Basis(Factor("dct", 1, 6), Factor("dct", 2, 4))
    matrix = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    left = Factor("dct", 2, 4)(torch.eye(4, dtype=torch.float64))
    right = Factor("dct", 1, 6)(torch.eye(6, dtype=torch.float64))
    whole = torch.kron(left, right) @ matrix.flatten()
    torch.testing.assert_close(basis(matrix).flatten(), whole)
    torch.testing.assert_close(basis(basis(matrix)), matrix)


def random_weight(rows: int, columns: int, widths: tuple[int, int], two_sided: bool) -> KashinWeight:
    made = torch.Generator().manual_seed(columns)
    parts = [
        Codes(
            torch.randint(0, 1 << width, (rows, columns), generator=made, dtype=torch.uint8),
            torch.rand(rows, width, generator=made).half(),
        )
        for width in widths
    ]
    sides = [Factor("dct", 7, rows), Factor("dct", 8, rows)] if two_sided else [None, None]
    return KashinWeight(
        *parts, Basis(Factor("dct", 5, columns), sides[0]), Basis(Factor("dct", 6, columns), sides[1])
    )


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("widths", [(2, 2), (2, 1), (3, 3), (4, 4)])
def test_a_stored_weight_round_trips_and_multiplies_like_the_dense_one(
    widths: tuple[int, int], two_sided: bool
) -> None:
    weight = random_weight(24, 50, widths, two_sided)
    read = kashin_weight_of(weight.tensors(), weight.shape)
    assert read.u.codes.equal(weight.u.codes) and read.v.codes.equal(weight.v.codes)
    assert read.dequantize().equal(weight.dequantize()) and read.shape == (24, 50)
    x = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(weight.product(x), x @ weight.dequantize().T, atol=1e-4, rtol=1e-5)


def test_bits_are_codes_and_peaks() -> None:
    """4 + 64/in bits per weight (arXiv:2609.11687), and 32 bytes of seeds for the whole weight."""
    weight = random_weight(64, 256, (2, 2), False)
    assert weight.bits == 4 + 64 / 256 + 8 * 32 / (64 * 256)


def test_values_of_codes_are_the_sums_of_signed_peaks() -> None:
    assert table_of(torch.tensor([[4.0, 1.0]])).tolist() == [[-5, -3, 3, 5]]
