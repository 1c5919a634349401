"""Dynamic 8-bit activations are those of compressed-tensors, which transformers runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.scheme import scheme_of
from shardwise.model.files.compressed_tensors import quantization_config
from shardwise.runtime.quantization.activations import rounded_to_float8, rounded_to_int8

ROUNDED = {"w8a8": rounded_to_int8, "fp8": rounded_to_float8}


def tokens(*shape: int) -> Tensor:
    """Normal tokens of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** (6 * torch.rand((*shape[:-1], 1), generator=generator) - 3)
    return torch.randn(shape, generator=generator) * size


@torch.no_grad()
@pytest.mark.parametrize("scheme", ROUNDED)
@pytest.mark.parametrize("shape", [(3, 13, 64), (13, 64), (2, 1, 5, 64), (2, 4, 5, 64)], ids=str)
def test_inputs_are_rounded_as_the_reader_rounds_them(scheme: str, shape: tuple[int, ...]) -> None:
    """A linear layer of compressed-tensors with the folder's config; latent attention passes four dimensions."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig(**quantization_config(scheme_of(scheme), [], "rtn"))
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantization.apply_quantization_config(layer, config)
    layer[0].weight.data = torch.eye(64)
    layer[0].weight_scale.data = torch.ones(64, 1) / 16  # the weight is then exactly 1 in both formats
    x = tokens(*shape)
    assert torch.equal(ROUNDED[scheme](x), layer(x)) and not torch.equal(layer(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_token_has_its_own_scale(dtype: torch.dtype) -> None:
    """The error is at most half of the 255 steps of its own token."""
    x = tokens(1, 13, 64).to(dtype)
    rounded, largest = rounded_to_int8(x), x.float().abs().amax(-1, keepdim=True)
    assert rounded.dtype == dtype
    bound = largest / 255 * 1.0001 + torch.finfo(dtype).eps * largest
    assert ((rounded.float() - x.float()).abs() <= bound).all()


def test_float8_tokens_keep_relative_precision() -> None:
    x = tokens(1, 13, 64)
    large = x.abs() > 2**-6 * x.abs().amax(-1, keepdim=True) / 448
    assert (((rounded_to_float8(x) - x).abs() / x.abs())[large] <= 2**-4 + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_zeros_stays_zero(dtype: torch.dtype) -> None:
    for rounded in ROUNDED.values():
        assert (rounded(torch.zeros(2, 3, 8, dtype=dtype)) == 0).all()
