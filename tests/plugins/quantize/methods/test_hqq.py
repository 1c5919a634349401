"""HQQ: less l_p error than clipping, less squared error than the largest weight's range, on heavy tails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.core.scheme import scheme_of
from shardwise.plugins.quantize.methods.base import QuantizationMethod, relative_output_error
from shardwise.plugins.quantize.methods.hqq import HalfQuadratic
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.runtime.quantization.weights import IntWeight


def heavy(rows: int, columns: int, freedom: int) -> Tensor:
    """Student's t: a normal over the root of a mean of squared normals."""
    generator = torch.Generator().manual_seed(0)
    squares = torch.randn(rows, columns, freedom, generator=generator).square().mean(2)
    return torch.randn(rows, columns, generator=generator) / squares.sqrt()


def lost(method: QuantizationMethod, weight: Tensor, scheme: str, norm: float) -> Tensor:
    """Sum of |error|^p of every row."""
    difference = method.quantize(weight, scheme_of(scheme), None).dequantize() - weight.float()
    return difference.abs().pow(norm).sum(1)


@pytest.mark.parametrize("scheme", ["w4a16-g64", "w3a16-g64", "w4a16-channel", "w3a16-channel"])
@pytest.mark.parametrize("freedom", [3, 4])
def test_heavy_tails_lose_less(scheme: str, freedom: int) -> None:
    weight = heavy(64, 512, freedom)
    largest, clip = (RoundToNearest(clip=clip, symmetric=False) for clip in (False, True))
    own = HalfQuadratic().quantize(weight, scheme_of(scheme), None).dequantize()
    nearest = largest.quantize(weight, scheme_of(scheme), None).dequantize()
    assert relative_output_error(weight, own, None) < relative_output_error(weight, nearest, None)
    few, many = (lost(method, weight, scheme, 0.7) for method in (HalfQuadratic(), clip))
    assert (few <= many).all()
    assert few.sum() < 0.99 * many.sum()


def test_groups_without_a_scale_stay_finite() -> None:
    weight = torch.zeros(4, 64)
    weight[1] = 0.5
    weight[2, 3] = -1e-30
    made = HalfQuadratic().quantize(weight.bfloat16(), scheme_of("w4a16-g32"), None)
    assert isinstance(made, IntWeight)
    assert made.scale.dtype == torch.bfloat16 and made.scale.isfinite().all() and (made.scale > 0).all()
    assert torch.allclose(made.dequantize(), weight, atol=0.02)
