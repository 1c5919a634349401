"""Families of sizes: published shapes, dimensions that shard, and small steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardwise.core.errors import RecipeError
from shardwise.plugins.scaling.family import family_of, family_sizes, sized
from shardwise.recipe.dimensions import check_dimensions
from shardwise.recipe.presets import PRESETS
from shardwise.recipe.sections import ModelSpec


@pytest.mark.parametrize("name", ["tiny", "gpt2-124m", "llama-3-8b"])
def test_every_size_is_a_valid_model_that_shards(name: str) -> None:
    pattern = PRESETS[name]
    for made in family_sizes(pattern):
        check_dimensions(made)
        assert made.heads % 2 == 0 and made.ffn % 32 == 0
        assert (made.vocab, made.tied, made.family) == (pattern.vocab, pattern.tied, pattern.family)
        if made.width >= 1024:
            assert made.heads % 4 == 0 and made.ffn % 256 == 0
        if made.width >= 2048:
            assert made.heads % 8 == 0


@pytest.mark.parametrize("name", ["tiny", "gpt2-124m", "llama-3-8b"])
def test_sizes_grow_in_small_steps(name: str) -> None:
    parameters = [made.parameters for made in family_sizes(PRESETS[name])]
    assert parameters[-1] > 1e12
    steps = [large / small for small, large in pairwise(parameters)]
    assert min(steps) > 1
    assert max(step for step, size in zip(steps, parameters, strict=False) if 1e8 < size < 1e12) < 1.35


def test_the_family_has_the_shapes_of_published_models() -> None:
    """Llama 3 8B itself; GPT-3's 13B (40 layers of 5120) and 175B (96 of 12288) within two layers."""
    llama = PRESETS["llama-3-8b"]
    assert llama in family_sizes(llama)
    assert sized(llama, 4096, 32) == llama
    for layers, width in ((40, 5120), (96, 12288)):
        near = [made.layers for made in family_sizes(PRESETS["gpt2-124m"]) if made.width == width]
        assert any(abs(each - layers) <= 2 for each in near)


def test_a_model_of_one_size_has_no_family() -> None:
    with pytest.raises(RecipeError, match="no family of sizes"):
        family_of(ModelSpec(hf="meta-llama/Llama-3-8B"))


def test_a_mixture_has_no_family() -> None:
    with pytest.raises(RecipeError, match="dense model of as many active parameters"):
        family_of(ModelSpec(preset="qwen3-30b-a3b"))


def test_latent_attention_has_no_family() -> None:
    latent = ModelSpec(preset="tiny", kv_heads=4, head_dim=24, kv_lora_rank=16, rope_head_dim=8)
    with pytest.raises(RecipeError, match="a model without latent attention"):
        family_of(latent)
