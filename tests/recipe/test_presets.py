"""The preset table: published parameter counts, overriding, and errors that name the key."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shardwise.core.errors import RecipeError
from shardwise.model.decoder import Decoder
from shardwise.recipe.dimensions import Dimensions, check_dimensions
from shardwise.recipe.presets import PRESETS, dimensions_of
from shardwise.recipe.sections import ModelSpec

# Counted from the weights their authors released.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v3": 671_026_404_352,  # and 58 x 256 biases of routers, which are no parameters
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_parameter_counts(name: str, count: int) -> None:
    assert PRESETS[name].parameters == count


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 3.35),
        ("qwen3-235b-a22b", 22.2),
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.2),
        ("deepseek-v3", 37.55),  # 36.6 without the embedding
    ],
)
def test_published_active_parameters(name: str, billions: float) -> None:
    assert PRESETS[name].active_parameters == pytest.approx(billions * 1e9, rel=0.003)


@pytest.mark.parametrize("name", PRESETS)
def test_formula_counts_what_is_built(name: str) -> None:
    dimensions = PRESETS[name]
    check_dimensions(dimensions)
    with torch.device("meta"):
        model = Decoder(dimensions)
    assert sum(p.numel() for p in model.parameters()) == dimensions.parameters
    assert sum(p.numel() for p in model.layers[-1].parameters()) == dimensions.block_parameters


def test_python_6m_is_what_its_name_says() -> None:
    assert 6_000_000 <= PRESETS["python-6m"].parameters < 7_000_000


def test_overriding_a_preset() -> None:
    assert dimensions_of(ModelSpec(preset="llama-3-8b", layers=2)).layers == 2
    assert dimensions_of(ModelSpec(preset="llama-3-8b", layers=2)).kv_heads == 8
    # Heads that are not grouped stay so; grouped ones keep their number of groups.
    assert dimensions_of(ModelSpec(preset="llama-2-7b", heads=16)).kv_heads == 16
    assert dimensions_of(ModelSpec(preset="llama-3-8b", heads=16)).kv_heads == 8


def test_dimensions_alone() -> None:
    llama = dimensions_of(ModelSpec(layers=2, width=96, heads=4))
    assert llama == Dimensions(2, 96, 4, 4, 256, vocab=256)
    gpt2 = dimensions_of(ModelSpec(layers=2, width=96, heads=4, family="gpt2", vocab=300))
    assert gpt2 == Dimensions(2, 96, 4, 4, 384, vocab=300, family="gpt2", tied=True)
    wide = dimensions_of(ModelSpec(layers=2, width=96, heads=5, head_dim=32, family="qwen3"))
    assert (wide.head_width, wide.kv_heads, wide.ffn, wide.tied) == (32, 5, 256, False)


@pytest.mark.parametrize(
    ("given", "where", "says"),
    [
        ({"preset": "Llama-3-8B"}, "model.preset", "did you mean llama-3-8b?"),
        ({"preset": "zzz"}, "model.preset", "choose one of tiny"),
        ({"layers": 2, "heads": 2}, "model.width", "width is missing"),
        ({"layers": 2, "width": 64, "heads": 5}, "model.heads", "use 4 heads"),
        ({"layers": 2, "width": 64, "heads": 4, "kv_heads": 3}, "model.kv_heads", "use 2 kv_heads"),
        ({"layers": 2, "width": 12, "heads": 4}, "model.heads", "even head dimension"),
        ({"preset": "qwen3-8b", "head_dim": 5}, "model.head_dim", "even head dimension"),
        ({"preset": "tiny", "v_head_dim": 8}, "model.v_head_dim", "only latent attention has it"),
        ({"preset": "qwen3-8b", "kv_lora_rank": 8}, "model.kv_lora_rank", "a block of qwen3 has none"),
        ({"preset": "tiny", "kv_lora_rank": 8}, "model.kv_heads", "for each of the 4 heads"),
        (
            {"preset": "deepseek-v3", "rope_head_dim": 192},
            "model.rope_head_dim",
            "even part of the 192 dimensions",
        ),
        ({"preset": "deepseek-v3", "v_head_dim": 256}, "model.v_head_dim", "values may not have more"),
        ({"preset": "tiny", "expert_ffn": 64}, "model.expert_ffn", "the model has no experts"),
        ({"preset": "gpt2-124m", "experts": 4}, "model.experts", "a block of gpt2 has none"),
        ({"preset": "tiny", "experts": 4, "dense_layers": 2}, "model.dense_layers", "no layer has experts"),
        ({"preset": "tiny", "experts": 6, "router_groups": 4}, "model.router_groups", "use 3 groups"),
        ({"preset": "tiny", "experts": 6, "router_groups": 6}, "model.router_groups", "use 3 groups"),
        ({"preset": "tiny", "experts": 6, "groups_per_token": 2}, "model.groups_per_token", "lower it"),
        (
            {"preset": "tiny", "experts": 6, "router_bias_rate": 0.1},
            "model.router_bias_rate",
            "router_bias: true",
        ),
        ({"preset": "tiny", "experts": 6, "experts_per_token": 7}, "model.experts_per_token", "at most 6"),
        (
            {"preset": "tiny", "experts": 6, "router_groups": 3, "experts_per_token": 3},
            "model.experts_per_token",
            "use at most 2",
        ),
        ({"layers": 1, "width": 9_999_991, "heads": 99_999}, "model.heads", "use 1 heads"),
    ],
)
def test_errors_name_the_key(given: dict[str, object], where: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        dimensions_of(ModelSpec(**given))  # type: ignore[arg-type]
    assert caught.value.where == where
    assert says in caught.value.line()


def test_presets_do_not_import_torch() -> None:
    code = "import sys, shardwise.recipe.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
