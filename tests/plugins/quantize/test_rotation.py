"""Rotations that are folded into weights: logits stay, outliers spread, and models that cannot be rotated say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import scheme_of
from shardwise.model.blueprint import Blueprint
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.native import NativeModel
from shardwise.model.untied import untied
from shardwise.plugins.quantize.blocks import is_rms_norm
from shardwise.plugins.quantize.methods.rtn import RoundToNearest
from shardwise.plugins.quantize.rotated_source import require_same_logits
from shardwise.plugins.quantize.rotation import Rotated, rotate_model
from shardwise.plugins.quantize.source import open_source_model
from shardwise.recipe.dimensions import Dimensions
from tests.harness.families import DENSE, SPARSE, config_of

ROTATED = {"llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3"}
IDS = torch.arange(24).view(2, 12) % 37


def scrambled(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Random values for every parameter, also norms and biases; two hidden channels are 30 times as large."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + values / 4 if "norm" in name else values / 8
        if name.endswith("embed_tokens.weight"):
            parameter.data[:, [1, 5]] *= 30
    return model.to(dtype).eval()


def loss_of_logits(blueprint: Blueprint, model: nn.Module, seed: int = 7) -> tuple[float, Tensor, Tensor]:
    """The relative difference of the logits by rotating; the hidden states after the embedding, before and after."""
    ids = IDS % (blueprint.vocab or 37)
    hidden = []
    first = blueprint.blocks(model)[0]
    first.register_forward_pre_hook(
        lambda _, args, named: hidden.append(args[0] if args else named["hidden_states"]), with_kwargs=True
    )
    before = blueprint.logits(model, ids)
    rotate_model(blueprint, model, seed)
    after = blueprint.logits(model, ids)
    return float((after - before).norm() / before.norm()), hidden[0], hidden[1]


def spread(x: Tensor) -> float:
    """Largest magnitude over the root mean square."""
    return float(x.abs().max() / x.square().mean().sqrt())


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize(
    "dimensions",
    [
        Dimensions(2, 64, 4, 2, 96, vocab=37, context=16),
        Dimensions(2, 48, 4, 4, 64, vocab=37, context=16, tied=True),  # 48 = 12 · 4: Paley's matrix
        Dimensions(1, 42, 3, 1, 51, vocab=37, context=16),  # 42 = 21 · 2: a random block; heads of 14
    ],
)
def test_native_logits_stay_and_outliers_spread(
    dimensions: Dimensions, dtype: torch.dtype, bound: float
) -> None:
    blueprint = NativeModel(dimensions)
    model = scrambled(blueprint.build(), dtype)
    difference, before, after = loss_of_logits(blueprint, model)
    assert difference < bound
    assert spread(after) < 0.8 * spread(before)
    for name, parameter in model.named_parameters():
        assert "norm" not in name or (parameter == 1).all()
    assert parameter.dtype == dtype


@torch.no_grad()
def test_rotated_weights_lose_less_in_four_bits() -> None:
    """Rows with outliers in two channels lose more than twice as much without a rotation."""
    blueprint = NativeModel(Dimensions(1, 64, 4, 4, 96, vocab=37, context=16))
    model = scrambled(blueprint.build(), torch.float32)
    layer = blueprint.blocks(model)[0].get_submodule("self_attn.q_proj")
    layer.weight.data[:, [1, 5]] *= 30
    lost = []
    for seed in (None, 7):
        if seed is not None:
            rotate_model(blueprint, model, seed)
        weight = blueprint.blocks(model)[0].get_submodule("self_attn.q_proj").weight
        made = RoundToNearest(clip=False).quantize(weight, scheme_of("w4a16-channel"), None)
        lost.append(float((made.dequantize() - weight).norm() / weight.norm()))
    assert lost[1] < lost[0] / 1.3


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Saves a tiny model of transformers and returns its blueprint."""

    def save(family: str, dtype: torch.dtype, **changes: Any) -> HuggingFaceModel:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config_of(family, **changes))
        scrambled(model, dtype).save_pretrained(tmp_path / family)
        return HuggingFaceModel(str(tmp_path / family), 12)

    return save


def filled(blueprint: HuggingFaceModel, dtype: torch.dtype) -> nn.Module:
    model = blueprint.build()
    blueprint.fill(model, seed=0)
    return model.to(dtype).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    [
        one if one in ("qwen2", "gemma2", "gpt2", "mixtral") else pytest.param(one, marks=pytest.mark.long)
        for one in [*DENSE, *SPARSE]
    ],
)
def test_models_of_transformers_are_rotated_or_refused(family: str, saved: Any) -> None:
    """Biases, norms of queries and keys, scaled residuals and 1 + weight are rotated; others say what they are."""
    blueprint = saved(family, torch.float64)
    model = filled(blueprint, torch.float64)
    if family in ROTATED:
        assert loss_of_logits(blueprint, model)[0] < 1e-6  # transformers' norms compute in fp32
        return
    with pytest.raises(RecipeError) as refused:
        rotate_model(blueprint, model, 0)
    line = refused.value.line()
    assert "--rotate" in line and refused.value.why


@torch.no_grad()
def test_a_tied_model_is_written_with_an_output_layer(saved: Any) -> None:
    """The rotated tensors fit the untied model, whose folder has one more tensor than the source."""
    tied = saved("llama", torch.float32, tie_word_embeddings=True)
    ids = IDS % 37
    expected = tied.logits(filled(tied, torch.float32), ids)
    weights, own = tied.weights(), untied(tied)
    rotated = Rotated(tied, weights.read, seed=3)
    assert rotated.tied and own.build().get_submodule("lm_head").weight.shape == (64, 32)
    model = own.build().eval()
    for name, parameter in model.named_parameters():
        parameter.data = rotated.read(name)
    assert float((own.logits(model, ids) - expected).norm() / expected.norm()) < 1e-4
    before, after = tied.hf_folder(), own.hf_folder()
    assert before.config.get("tie_word_embeddings", True) and after.config["tie_word_embeddings"] is False
    assert len(after.groups) == len(before.groups) + 1
    assert dict(after.groups[-1].shapes) == {"lm_head.weight": (64, 32)}
    assert untied(own) is own


def test_an_untied_model_is_left_alone() -> None:
    blueprint = NativeModel(Dimensions(1, 16, 2, 2, 24, vocab=37, context=16))
    assert untied(blueprint) is blueprint


def test_seeds_give_rotations_and_repeat() -> None:
    blueprint = NativeModel(Dimensions(1, 16, 2, 2, 24, vocab=37, context=16))
    values = dict(scrambled(blueprint.build(), torch.float32).named_parameters())
    read = [Rotated(blueprint, values.__getitem__, seed).read("embed_tokens.weight") for seed in (1, 1, 2)]
    assert torch.equal(read[0], read[1]) and not torch.equal(read[0], read[2])


class _ClippedNorm(nn.Module):
    """An RMSNorm for the matrix that probes it. Hidden states [b, s, h] are clipped, which a rotation changes."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        out = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return self.weight * (out if x.dim() == 2 else out.clamp(-1, 1))


def test_a_rotation_that_moves_the_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a batch of the whole model, before the pass."""
    from transformers import AutoModelForCausalLM

    model = scrambled(AutoModelForCausalLM.from_config(config_of("llama")), torch.float32)
    model.save_pretrained(tmp_path / "llama")
    require_same_logits(open_source_model(str(tmp_path / "llama"), 12))
    build = HuggingFaceModel.build

    def changed(blueprint: HuggingFaceModel, depth: int | None = None) -> nn.Module:
        built = build(blueprint, depth)
        built.model.norm = _ClippedNorm(built.model.norm.weight)
        return built

    monkeypatch.setattr(HuggingFaceModel, "build", changed)
    with pytest.raises(RecipeError, match="cannot be rotated") as refused:
        require_same_logits(open_source_model(str(tmp_path / "llama"), 12))
    assert "its logits would move" in refused.value.line()


class _Centered(nn.RMSNorm):
    """A norm without a bias that subtracts the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def test_a_norm_that_subtracts_the_mean_is_no_rms_norm() -> None:
    """Whatever its base class is."""
    assert is_rms_norm(nn.RMSNorm(8)) and is_rms_norm(nn.RMSNorm(8).to("meta"))
    assert not is_rms_norm(_Centered(8)) and not is_rms_norm(nn.LayerNorm(8))
    assert not is_rms_norm(nn.LayerNorm(8, bias=False))
