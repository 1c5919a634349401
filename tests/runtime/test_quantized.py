"""Packed weights: the published levels, exact bits, errors below those of other 4-bit forms, what a product keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.runtime.quantized import NF4_LEVELS, Packing, bits_per_weight, linear

KINDS = ("nf4", "int8")


def normal(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02


def packed(kind: str, weight: Tensor) -> tuple[Packing, Tensor]:
    how = Packing(kind, *weight.shape)
    return how, how.pack(weight, slice(0, how.shape[0]))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_levels_are_the_quantiles_of_a_normal_distribution() -> None:
    """Nine above zero and eight below, of equal chance but for the tails, over their largest (the paper's eq. 4)."""
    tail = 0.5 * (1 - 1 / 32 + 1 - 1 / 30)
    above = torch.special.ndtri(torch.linspace(tail, 0.5, 9, dtype=torch.float64))
    below = -torch.special.ndtri(torch.linspace(tail, 0.5, 8, dtype=torch.float64))
    levels = torch.cat([below[:-1], above]).sort().values
    torch.testing.assert_close(
        torch.tensor(NF4_LEVELS, dtype=torch.float64), levels / levels.max(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4 + 8 / 64 + 32 / (64 * 256)), ("int8", 8 + 32 / 4096)])
def test_bits_are_exact(kind: str, bits: float) -> None:
    how, codes = packed(kind, normal(1024, 4096))
    assert bits_per_weight(how) == bits == 8 * codes.numel() * codes.itemsize / (1024 * 4096)
    assert kind != "nf4" or round(bits, 3) == 4.127


def test_nf4_is_closer_to_normal_weights_than_other_forms_in_four_bits() -> None:
    """At one scale for 64 values each: integers, and both splits of four bits into exponent and mantissa."""
    weight = normal(512, 512)
    how, codes = packed("nf4", weight)
    blocks = weight.view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    others = {
        "int4": torch.arange(-7, 8) / 7,
        "e2m1": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6,
        "e3m0": torch.tensor([0, *(2.0**e for e in range(-2, 5))]) / 16,
    }
    own = error(how.unpack(codes, torch.float32), weight)
    for name, levels in others.items():
        both = torch.cat([-levels, levels]).unique()
        nearest = both[(blocks / scale).unsqueeze(2).sub(both).abs().argmin(2)] * scale
        assert own < 0.95 * error(nearest.view_as(weight), weight), name
    assert own < 0.094


def test_eight_bits_miss_by_less_than_a_percent() -> None:
    how, codes = packed("int8", normal(64, 512))
    assert error(how.unpack(codes, torch.float32), normal(64, 512)) < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 55), (64, 64), (130, 257)])
def test_rows_pack_alike_alone_and_together(kind: str, shape: tuple[int, int]) -> None:
    """So every rank may pack its own; zeros stay zeros."""
    weight = normal(*shape)
    how, codes = packed(kind, weight)
    assert tuple(codes.shape) == how.shape
    alone = [how.pack(weight, slice(row, row + 1)) for row in range(how.shape[0])]
    assert torch.equal(torch.cat(alone), codes)
    assert how.unpack(codes, torch.float32).shape == weight.shape
    zeros = torch.zeros(shape)
    assert torch.equal(how.unpack(packed(kind, zeros)[1], torch.float32), zeros)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_keeps_packed_bytes_alone(kind: str, dtype: torch.dtype) -> None:
    how, codes = packed(kind, normal(96, 128))
    x = torch.randn(5, 7, 128, dtype=dtype, requires_grad=True)
    bias = torch.randn(96, dtype=dtype)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = linear(x, codes, bias, how)
    assert [tensor.dtype for tensor in kept] == [torch.uint8] and kept[0].shape == codes.shape
    gradient = torch.randn(5, 7, 96, dtype=dtype)
    out.backward(gradient)
    weight = how.unpack(codes, dtype)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(x.grad, gradient @ weight)
