"""Dynamic 8-bit activations per token, and products of 8-bit codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.core.scheme import scheme_of
from shardwise.quantize.methods.rtn import RoundToNearest
from shardwise.runtime.quantization.activations import (
    QuantizedLinear,
    quantize_tokens,
    quantize_tokens_float8,
)
from shardwise.runtime.quantization.weights import Float8Weight, IntWeight


def tokens(count: int, channels: int) -> Tensor:
    """Normal tokens of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.linspace(-3, 3, count).unsqueeze(1)
    return torch.randn(count, channels, generator=generator) * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_token_has_its_own_scale(dtype: torch.dtype) -> None:
    """The error of a value is at most half a step of its own token, 1/254 of the token's largest magnitude."""
    x = tokens(13, 64).to(dtype)
    codes, scale = quantize_tokens(x.view(1, 13, 64))
    assert codes.dtype == torch.int8 and codes.shape == (1, 13, 64) and scale.shape == (1, 13, 1)
    assert (codes.abs().amax(-1) == 127).all() and int(codes.min()) >= -127
    largest = x.float().abs().amax(-1, keepdim=True)
    assert ((codes * scale - x.float()).abs() <= largest / 254 * 1.0001).all()


def test_float8_tokens_keep_relative_precision() -> None:
    x = tokens(13, 64)
    values, scale = quantize_tokens_float8(x)
    assert (values.float().abs().amax(-1) == 448).all()
    large = x.abs() > 2**-6 * scale
    assert (((values.float() * scale - x).abs() / x.abs())[large] <= 2**-4 + 1e-6).all()


def test_a_token_of_zeros_stays_zero() -> None:
    for quantize in (quantize_tokens, quantize_tokens_float8):
        codes, scale = quantize(torch.zeros(2, 8))
        assert (codes.float() * scale == 0).all() and scale.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_int8_products_are_those_of_integer_arithmetic(bias: bool) -> None:
    """The scaled sums of int64 products, for codes that reach both ends."""
    x, weight = tokens(5, 256), torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    given = torch.linspace(-1, 1, 7) if bias else None
    made = RoundToNearest().quantize(weight, scheme_of("w8a8"), None)
    assert isinstance(made, IntWeight)
    codes, scale = quantize_tokens(x)
    sums = codes.long() @ made.codes.long().T
    expected = sums.double() * scale.double() * made.scale.double().squeeze(1)
    out = QuantizedLinear(made, given)(x)
    assert torch.allclose(out.double(), expected + (given.double() if bias else 0), rtol=1e-6, atol=1e-9)
    assert float((out - (x @ weight.T + (given if bias else 0))).norm() / out.norm()) < 0.02


def test_float8_products_are_near_those_of_the_weights() -> None:
    """Both sides have relative errors of at most 1/16, about 1/38 in the mean square; the product 1.4 times that."""
    x, weight = tokens(40, 256), torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    made = RoundToNearest().quantize(weight, scheme_of("fp8"), None)
    assert isinstance(made, Float8Weight)
    out = QuantizedLinear(made, None)(x.bfloat16())
    assert out.dtype == torch.bfloat16
    exact = x @ weight.T
    assert float(((out - exact).norm(dim=1) / exact.norm(dim=1)).square().mean().sqrt()) < 0.04


@pytest.mark.parametrize(("scheme", "symmetric"), [("w8a16", False), ("w4a16-g32", True)])
def test_products_refuse_groups_and_zero_points(scheme: str, symmetric: bool) -> None:
    made = RoundToNearest(symmetric=symmetric).quantize(torch.randn(4, 64), scheme_of(scheme), None)
    assert isinstance(made, IntWeight)
    with pytest.raises(ValueError, match="symmetric weights with one scale"):
        QuantizedLinear(made, None)
