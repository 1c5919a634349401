"""AWQ: scales that change no output before rounding, and less output error after it where channels are outliers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.scheme import scheme_of
from shardwise.model.native import NativeModel
from shardwise.quantize.blocks import fold
from shardwise.quantize.methods.awq import AWQ, awq_scale, scaling_groups
from shardwise.quantize.methods.base import InputStatistics, relative_output_error
from shardwise.quantize.methods.rtn import RoundToNearest
from shardwise.recipe.presets import Dimensions
from tests.harness.families import DENSE, config_of

SCALABLE = {"llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "stablelm"}


def statistics_of(inputs: Tensor) -> InputStatistics:
    return InputStatistics(inputs.T @ inputs / len(inputs), inputs.abs().mean(0), len(inputs))


def with_outliers(tokens: int, channels: int) -> Tensor:
    """Normal inputs with a tenth of the channels 20 times as large, as after a norm of a language model."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tokens, channels, generator=generator)
    inputs[:, torch.randperm(channels, generator=generator)[: channels // 10]] *= 20
    return inputs


def scramble(model: nn.Module) -> None:
    """Random values for every parameter, also norms and biases."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + values / 4 if "norm" in name else values / 8)


def fold_random_scales(block: nn.Module) -> int:
    """Scale every scaling group by random factors of 1/4 to 4; how many there are."""
    generator = torch.Generator().manual_seed(1)
    groups = scaling_groups(block)
    for group in groups:
        layers = [block.get_submodule(name) for name in group.layers]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        scale = 4 ** (2 * torch.rand(linear[0].in_features, generator=generator) - 1)
        fold(block.get_submodule(group.previous), linear, scale)
    return len(groups)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dimensions", "count"),
    [
        (Dimensions(2, 48, 4, 4, 64, vocab=37, context=16), 4),
        (Dimensions(2, 48, 4, 2, 64, vocab=37, context=16), 3),  # values are shared by query heads
        (Dimensions(2, 48, 4, 4, 64, vocab=37, context=16, family="gpt2"), 3),  # GELU between up and down
    ],
)
def test_native_logits_stay_when_scales_are_folded(dimensions: Dimensions, count: int) -> None:
    model = NativeModel(dimensions).build()
    scramble(model)
    ids = torch.arange(16).view(1, 16) % 37
    before = model(ids)
    assert [fold_random_scales(block) for block in model.layers] == [count, count]
    assert float((model(ids) - before).norm() / before.norm()) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    [one if one in ("gemma", "gemma2") else pytest.param(one, marks=pytest.mark.long) for one in DENSE],
)
def test_logits_of_transformers_stay_when_scales_are_folded(family: str) -> None:
    """Blocks of Llama's shape are scaled; those with other norms, orders or fused projections are left alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    scramble(model)
    ids = torch.arange(16).view(1, 16)
    before = model(ids).logits
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    counts = [fold_random_scales(block) for block in blocks]
    assert counts == [3, 3] if family in SCALABLE else counts == [0, 0]
    assert float((model(ids).logits - before).norm() / before.norm()) < 2e-6


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w3a16-g32", "w3a16-channel", "w8a8"])
def test_outliers_lose_less_than_by_rounding_to_nearest(scheme: str) -> None:
    """Scaled layers are compared with the outputs of the layers before scaling, and with clipping alone."""
    inputs, asked = with_outliers(1000, 128), scheme_of(scheme)
    statistics = statistics_of(inputs)
    weights = [torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    scale = awq_scale(weights, statistics, asked)
    assert float(scale.max() / scale.min()) > 2
    scaled = statistics.divided(scale)
    for weight in weights:
        made = AWQ().quantize(weight * scale, asked, scaled).dequantize() / scale
        clipped = AWQ().quantize(weight, asked, statistics).dequantize()
        nearest = RoundToNearest(symmetric=scheme == "w8a8").quantize(weight, asked, None).dequantize()
        lost, clipped_lost, nearest_lost = (
            float(((weight - rounded) @ inputs.T).norm()) for rounded in (made, clipped, nearest)
        )
        assert lost < 0.9 * nearest_lost
        assert lost < clipped_lost


def test_divided_statistics_are_those_of_divided_inputs() -> None:
    inputs, scale = with_outliers(100, 32), torch.linspace(0.5, 2, 32)
    divided, expected = statistics_of(inputs).divided(scale), statistics_of(inputs / scale)
    assert torch.allclose(divided.hessian, expected.hessian, rtol=1e-4, atol=1e-4)
    assert torch.allclose(divided.magnitude, expected.magnitude)


def test_inputs_of_one_magnitude_are_not_scaled_much() -> None:
    """Without outliers the search may keep alpha = 0; the scale is then 1."""
    statistics = InputStatistics(torch.eye(64), torch.ones(64), 10)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(awq_scale([weight], statistics, scheme_of("w4a16-g32")), torch.ones(64))


def test_clipping_of_a_group_sees_correlated_inputs() -> None:
    """Errors of channels with the same input cancel or add; only the Hessian of the group knows."""
    shared = torch.randn(500, 8, generator=torch.Generator().manual_seed(4))
    inputs = shared @ torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(6))
    statistics, scheme = statistics_of(inputs), scheme_of("w3a16-g64")
    diagonal = InputStatistics(torch.diag(statistics.hessian.diagonal()), statistics.magnitude, 500)
    lost, blind = (
        relative_output_error(weight, AWQ().quantize(weight, scheme, seen).dequantize(), statistics)
        for seen in (statistics, diagonal)
    )
    assert lost < 0.9 * blind
