"""Scales, zero points and codes of integer schemes, float8 and NF4: conventions, and errors of normal weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import QUANTIZATION_METHODS, check_method, scheme_of
from shardwise.plugins.quantize.methods import method_of
from shardwise.plugins.quantize.methods.base import InputStatistics, NotConverged, relative_output_error
from shardwise.plugins.quantize.methods.rounding import absmax, clipped, in_groups, squared_error
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.runtime.quantization.hadamard import RandomHadamard
from shardwise.runtime.quantization.weights import Float8Weight, IntWeight, NF4Weight

# Levels that bitsandbytes publishes (bitsandbytes/functional.py, create_normal_map).
BITSANDBYTES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def student(rows: int, columns: int, freedom: float, seed: int = 0) -> Tensor:
    """Student's t: a normal over the root of a chi-square, which is a sum of squared normals for whole degrees."""
    generator = torch.Generator().manual_seed(seed)
    squares = torch.randn(rows, columns, int(freedom), generator=generator).square().mean(2)
    return torch.randn(rows, columns, generator=generator) / squares.sqrt()


def error(weight: Tensor, scheme: str, **settings: bool) -> float:
    made = RoundToNearest(**settings).quantize(weight, scheme_of(scheme), None)
    return relative_output_error(weight, made.dequantize(), None)


def test_four_bits_per_channel_lose_the_published_share_of_a_normal_weight() -> None:
    """64 rows of 1024: 0.1447 (largest weight), 0.1250 (with zero points), 0.1068 (clipped), within sampling error.

    The best 16 uniform levels of a normal distribution lose 0.1074 (Max 1960, table I: 0.01154 = 0.1074²).
    """
    weight = normal(64, 1024)
    assert error(weight, "w4a16-channel", clip=False) == pytest.approx(0.1447, abs=0.0015)
    assert error(weight, "w4a16-channel", clip=False, symmetric=False) == pytest.approx(0.1250, abs=0.0015)
    assert error(weight, "w4a16-channel") == pytest.approx(0.1074, abs=0.0015)
    assert error(weight, "w4a16-channel", symmetric=False) == pytest.approx(0.1068, abs=0.0008)


@pytest.mark.parametrize("freedom", [3, 4])
def test_a_rotation_makes_heavy_tails_normal(freedom: int) -> None:
    """Published: 0.1067 for rotated rows with clipped ranges, as for normal ones; 0.2064 (t4) without the rotation."""
    weight = student(64, 1024, freedom)
    rotated = RandomHadamard(1024, seed=0).apply(weight)
    assert error(rotated, "w4a16-channel", symmetric=False) <= 0.1067
    assert error(weight, "w4a16-channel", symmetric=False) > 0.19


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clipped_group_is_never_worse(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    groups = student(16, 256, 3).view(16, 4, 64)
    groups[0, 0] += 3.0  # all positive: 0 stays a level
    groups[1, 1] = 0.0
    whole, tried = (choose(groups, bits, symmetric, dtype) for choose in (absmax, clipped))
    lost, least = (squared_error(groups, levels.rounded(groups), None) for levels in (whole, tried))
    assert (least <= lost).all()
    assert least.sum() < lost.sum()
    assert least[1, 1] == 0
    if not symmetric:
        without = clipped(groups, bits, True, dtype)
        assert (least <= squared_error(groups, without.rounded(groups), None)).all()


@pytest.mark.parametrize("name", ["w8a16", "w8a16-g32", "w4a16-g32"])
def test_small_weights_lose_as_much_in_fp16_as_in_fp32(name: str) -> None:
    """Scales of 8 bits are subnormal numbers of fp16 here."""
    weight = 1e-3 * normal(64, 256)
    assert error(weight.half(), name) == pytest.approx(error(weight.half().float(), name), rel=0.03)


def test_importance_moves_the_range_to_the_channels_that_count() -> None:
    """A channel with large inputs keeps its outlier; the Hessian of one group with a diagonal says the same."""
    groups = normal(8, 64).view(8, 1, 64)
    groups[:, 0, 5] = 9.0
    importance = torch.ones(64)
    importance[5] = 1e4
    plain = clipped(groups, 3, True, torch.float32)
    kept = clipped(groups, 3, True, torch.float32, importance)
    assert ((kept.rounded(groups) - groups)[:, 0, 5].abs() < 0.1 * 9).all()
    assert ((plain.rounded(groups) - groups)[:, 0, 5].abs() > 0.1 * 9).all()
    same = clipped(groups, 3, True, torch.float32, torch.diag(importance).unsqueeze(0))
    assert torch.equal(same.scale, kept.scale)


@pytest.mark.parametrize("name", ["w4a16-g32", "w3a16-channel", "w8a16", "w8a8", "w2a16-g64"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_follow_the_conventions_of_compressed_tensors(name: str, symmetric: bool) -> None:
    """Signed codes and zero points of b bits; weight = (code - zero) scale, with scales in the dtype of the model."""
    scheme, weight = scheme_of(name), normal(6, 128).bfloat16()
    made = RoundToNearest(symmetric=symmetric).quantize(weight, scheme, None)
    assert isinstance(made, IntWeight)
    low, high = -(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1
    assert made.codes.dtype == torch.int8 and low <= int(made.codes.min()) and int(made.codes.max()) <= high
    assert made.scale.dtype == torch.bfloat16 and (made.scale > 0).all()
    assert (made.zero is None) == (symmetric or name == "w8a8")
    size = scheme.group or 128
    for row, column in itertools.product(range(6), (0, 31, 32, 127)):
        group = column // size
        zero = 0 if made.zero is None else int(made.zero[row, group])
        expected = (int(made.codes[row, column]) - zero) * float(made.scale[row, group])
        assert float(made.dequantize()[row, column]) == pytest.approx(expected)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_weights_of_8_bit_products_are_whole_bytes_without_zero_points(method: str) -> None:
    statistics = InputStatistics(torch.eye(64), torch.ones(64), 64)
    made = method_of(method).quantize(normal(8, 64), scheme_of("w8a8"), statistics)
    assert isinstance(made, IntWeight)
    assert made.zero is None and made.activation_bits == 8
    assert made.tensors()["weight"].dtype == torch.int8


def test_float8_keeps_the_largest_weight_and_three_bits_of_every_mantissa() -> None:
    weight = normal(16, 256)
    weight[3] *= 1e-3
    weight[4] = 0
    made = method_of("rtn").quantize(weight, scheme_of("fp8"), None)
    assert isinstance(made, Float8Weight)
    assert (made.values.float().abs().amax(1)[weight.abs().amax(1) > 0] == 448).all()
    normal_range = weight.abs() > 2**-6 * made.scale.float()  # e4m3's smallest normal number is 2^-6
    relative = ((made.dequantize() - weight).abs() / weight.abs())[normal_range]
    assert float(relative.max()) <= 2**-4 + 1e-6
    assert made.bits == 8 + 32 / 256


def test_nf4_has_the_published_levels_and_4_127_bits() -> None:
    levels = torch.tensor(BITSANDBYTES)
    weight = levels.repeat(256, 16)  # every block of 64 has the largest magnitude 1
    made = method_of("rtn").quantize(weight, scheme_of("nf4"), None)
    assert isinstance(made, NF4Weight)
    assert torch.equal(made.dequantize(), weight)
    assert made.bits == pytest.approx(4.127, abs=5e-4)


def test_nf4_loses_less_of_a_normal_weight_than_four_integer_bits() -> None:
    weight = normal(64, 1024)
    assert error(weight, "nf4") < error(weight, "w4a16-g64")


def test_a_weight_that_has_no_levels_stays_as_it_is() -> None:
    with pytest.raises(NotConverged, match="multiple of the group"):
        in_groups(torch.ones(4, 96), scheme_of("w4a16-g64"))
    for broken in (float("nan"), float("inf")):
        with pytest.raises(NotConverged, match="infinite or undefined"):
            method_of("rtn").quantize(torch.full((2, 64), broken), scheme_of("nf4"), None)


@pytest.mark.parametrize("method", QUANTIZATION_METHODS)
@pytest.mark.parametrize("scheme", ["fp8", "nf4", "w8a8", "w8a16", "w4a16-g128", "w3a16-channel"])
def test_pairs_of_method_and_scheme(method: str, scheme: str) -> None:
    """rtn makes every scheme; the others make integers, with their own limits, each refused in one line."""
    integers = {"w8a8", "w8a16", "w4a16-g128", "w3a16-channel"}
    made = {
        "rtn": integers | {"fp8", "nf4"},
        "gptq": integers,
        "awq": integers,
        "hqq": integers - {"w8a8"},
        "kashin": {"w8a16", "w3a16-channel"},
    }
    if scheme in made[method]:
        check_method(method, scheme_of(scheme))
        return
    with pytest.raises(RecipeError, match=f"{method} cannot make {scheme}") as refused:
        check_method(method, scheme_of(scheme))
    assert "--method rtn" in refused.value.line()


def test_another_method_is_refused() -> None:
    for ask in (method_of, lambda name: check_method(name, scheme_of("w8a8"))):
        with pytest.raises(RecipeError, match="no method is called spqr") as refused:
            ask("spqr")
        assert "rtn, hqq, gptq, awq, kashin" in refused.value.line()
    assert [name for name in QUANTIZATION_METHODS if method_of(name).calibrated] == ["gptq", "awq"]
