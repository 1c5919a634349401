"""Hadamard matrices, and the orthogonal transforms that are made of them."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.runtime.quantization.hadamard import (
    RandomHadamard,
    hadamard_matrix,
    random_orthogonal,
    walsh_hadamard,
)
from shardwise.runtime.torch_private import FakeTensorMode


def test_walsh_hadamard_is_sylvesters_matrix() -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(9):
        assert torch.allclose(walsh_hadamard(torch.eye(len(matrix)).double()), matrix / len(matrix) ** 0.5)
        matrix = torch.kron(two, matrix)
    with pytest.raises(ValueError, match="no power of two"):
        walsh_hadamard(torch.ones(3, 12))


@pytest.mark.parametrize("order", [4, 8, 12, 20, 24, 28, 36, 44, 60, 68, 72, 76, 108, 140, 148])
def test_paley_matrices_are_hadamard_matrices(order: int) -> None:
    """Entries are ±1 and rows are orthogonal. 28 and 36 need the second construction."""
    matrix = hadamard_matrix(order)
    assert matrix is not None and (matrix.abs() == 1).all()
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


def test_orders_without_a_construction() -> None:
    assert [order for order in range(1, 100) if order % 4 and hadamard_matrix(order) is not None] == []
    assert hadamard_matrix(92) is None  # 91 = 7 · 13; 45 = 3² · 5
    assert hadamard_matrix(172) is None  # 171 = 9 · 19; 85 = 5 · 17: the 11,008 of Llama-2 is 43 · 2^8


@pytest.mark.parametrize("size", [1, 2, 64, 48, 42, 576, 896, 1536, 3584, 5120, 43 * 8, 21])
def test_transforms_are_orthogonal_and_repeat(size: int) -> None:
    rotation = RandomHadamard(size, seed=3)
    x = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotated = rotation.apply(x)
    assert rotated.shape == x.shape
    assert torch.allclose(rotation.inverse(rotated), x, atol=1e-12)
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(RandomHadamard(size, seed=3).apply(x), rotated)
    if size > 2:
        assert not torch.allclose(RandomHadamard(size, seed=4).apply(x), rotated)


@pytest.mark.parametrize(
    ("size", "most"), [(4096, 1.0), (576, 1.0), (3584, 1.0), (5120, 1.0), (43 * 256, 4.0)]
)
def test_one_outlier_spreads_over_all_channels(size: int, most: float) -> None:
    """Hadamard factors spread it evenly; a random block of 43 lets the largest entry be below 4 times the mean."""
    x = torch.zeros(size, dtype=torch.float64)
    x[size // 3] = 1.0
    assert float(RandomHadamard(size, seed=0).apply(x).abs().max()) <= most / math.sqrt(size) * (1 + 1e-9)


def test_random_blocks_are_orthogonal() -> None:
    block = random_orthogonal(43, seed=1)
    assert torch.allclose(block @ block.T, torch.eye(43, dtype=torch.float64), atol=1e-12)


def test_fake_tensors_leave_nothing_behind() -> None:
    """A prediction rotates fake tensors before the same process rotates real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        RandomHadamard(256, seed=0).apply(torch.empty(2, 256))
    x = torch.eye(256)
    rotated = RandomHadamard(256, seed=0).apply(x)
    assert type(rotated) is torch.Tensor
    assert torch.allclose(rotated @ rotated.T, x, atol=1e-5)
