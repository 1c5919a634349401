"""AWQ: scales that change no output before rounding, and less output error after it where channels are outliers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import scheme_of
from shardwise.model.native import NativeModel
from shardwise.plugins.quantize.blocks import fold, norm_offset
from shardwise.plugins.quantize.methods.awq import AWQ, awq_scale, scaling_groups
from shardwise.plugins.quantize.methods.base import InputStatistics, relative_output_error
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.recipe.dimensions import Dimensions
from tests.harness.families import causal_families, config_of

pytest.importorskip("transformers")

SCALABLE = {
    "arcee", "cwm", "dots1", "ernie4_5", "exaone", "exaone_moe", "gemma", "glm4_moe", "granite", "helium", "hy_v3",
    "internlm3", "iquestcoder", "jais2", "llama", "mimo_v2_flash", "ministral", "ministral3", "mistral", "nemotron",
    "qwen2", "qwen3", "qwen3_5_text", "sarvam_moe", "seed_oss", "smollm3", "stablelm",
}  # fmt: skip
"""Families with blocks of Llama's shape; of some mixtures these are the dense blocks."""
FAILING = {"cpmant"}
"""A family whose tiny model does not run in transformers."""


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
    [
        one if one in ("gemma", "gemma2", "nemotron") else pytest.param(one, marks=pytest.mark.long)
        for one in [*causal_families()]
    ],
)
def test_logits_of_transformers_stay_when_scales_are_folded(family: str) -> None:
    """Blocks of Llama's shape are scaled; those with other norms, orders, fused projections or experts are left alone.

    In fp32 and, for models that compute in it, in fp64, where norms that round to fp32 leave about 1e-7.
    """
    from transformers import AutoModelForCausalLM

    ids = torch.arange(16).view(1, 16) + 3
    for dtype in (torch.float32, torch.float64):
        model = AutoModelForCausalLM.from_config(config_of(family)).to(dtype).eval()
        scramble(model)
        try:
            before = model(ids, use_cache=False).logits
        except (IndexError, RuntimeError):
            assert dtype == torch.float64 or family in FAILING
            continue
        kinds = set(model._no_split_modules or ())
        counts = [fold_random_scales(block) for block in model.modules() if type(block).__name__ in kinds]
        assert (sum(counts) > 0) == (family in SCALABLE)
        after = model(ids, use_cache=False).logits
        assert float((after - before).norm() / before.norm()) < 1e-6


class _SquaredGain(nn.RMSNorm):
    """A norm whose gain is the square of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight


class _WithScale(nn.LayerNorm):
    """A norm with one more parameter."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(1))


class _ScaledBias(nn.LayerNorm):
    """A norm whose bias is also multiplied by the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (super().forward(x) - self.bias) / self.weight + self.weight * self.bias


class _OneMore(nn.LayerNorm):
    """A norm that multiplies by 1 + weight, as Nemotron's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


def test_subclasses_of_norms_are_measured() -> None:
    """A subclass may compute something else; one whose gain is not known is refused."""
    assert norm_offset(nn.LayerNorm(8)) == norm_offset(nn.RMSNorm(8)) == 0.0
    assert norm_offset(_OneMore(8)) == norm_offset(_OneMore(8).to("meta")) == 1.0
    for norm in (_SquaredGain(8), _WithScale(8), _ScaledBias(8)):
        with pytest.raises(RecipeError, match="the gain of a _"):
            norm_offset(norm)


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
