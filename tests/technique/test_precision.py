"""Precision: dtypes of weights, buffers and sums, and the warning about ranges."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.checkpoint.checkpoint import restore, save_checkpoint
from shardwise.core.errors import RecipeError
from shardwise.engine.train_state import TrainState
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, refuse_broken, strategy_from
from shardwise.technique.precision import Precision
from tests.harness.pool import Pool
from tests.harness.tiny_run import MODEL, make_run, train


def dtypes(settings: dict[str, Any]) -> tuple[set[str], set[str], str]:
    """Of weights, of moments, of the reduction, after a step."""
    run = make_run(3, settings=settings)
    train(run, range(1))
    weights = {str(p.dtype) for p in run.model.parameters()}
    moments = {str(t.dtype) for state in run.optimizer.state.values() for t in state.values() if t.ndim}
    assert isinstance(run.model, FSDPModule)
    return weights, moments, str(run.model._get_fsdp_state()._mp_policy.reduce_dtype)


@pytest.mark.parametrize(
    ("settings", "weights", "reduction"),
    [
        ({}, "float32", "float32"),
        ({"precision": "bf16"}, "float32", "float32"),
        ({"precision": "fp16", "reduce_dtype": "compute"}, "float32", "float16"),
        ({"precision": "bf16", "master_weights": False}, "bfloat16", "float32"),
        ({"precision": "fp64"}, "float64", "float64"),
    ],
)
def test_dtypes(settings: dict[str, Any], weights: str, reduction: str, pool: Pool) -> None:
    wide = "float64" if settings.get("precision") == "fp64" else "float32"
    for found in pool.run(2, dtypes, settings):
        assert found == ({f"torch.{weights}"}, {f"torch.{wide}"}, f"torch.{reduction}")


@pytest.mark.parametrize(
    ("settings", "weights", "buffers"),
    [
        ({"precision": "bf16"}, torch.float32, torch.float32),
        ({"precision": "bf16", "master_weights": False}, torch.bfloat16, torch.float32),
        ({"precision": "fp16", "buffer_dtype": "compute"}, torch.float32, torch.float16),
    ],
)
def test_buffers_have_a_dtype_of_their_own(
    settings: dict[str, Any], weights: torch.dtype, buffers: torch.dtype
) -> None:
    norm = torch.nn.BatchNorm1d(3)
    site: Any = SimpleNamespace(
        strategy=strategy_from(settings),
        context=SimpleNamespace(blueprint=SimpleNamespace(trained_in=None)),
        view=SimpleNamespace(model=norm),
        options=SimpleNamespace(),
    )
    Precision().apply(site)
    assert norm.weight.dtype == weights and norm.running_mean is not None
    assert norm.running_mean.dtype == buffers and norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"precision": "fp16", "master_weights": False}, "the nearest that works is master_weights: True"),
        ({"precision": "fp32", "reduce_dtype": "compute"}, "the nearest that works is reduce_dtype: fp32"),
        ({"precision": "fp16", "optimizer_in_backward": True}, "set optimizer.clip_norm"),
        ({"precision": "bf16", "optimizer_in_backward": True}, "set optimizer.clip_norm"),
    ],
)
def test_what_cannot_be_combined(strategy: dict[str, Any], words: str) -> None:
    recipe = recipe_of({"model": MODEL, "steps": 1, "batch_size": 1, "strategy": strategy}, SETTINGS)
    with pytest.raises(RecipeError) as error:
        refuse_broken(recipe, 1, lambda key: f"strategy.{key}")
    assert words in error.value.line()


# ---- weights that were trained in bf16 ----------------------------------------------------------------------


def warned(folder: Path, precision: str) -> list[str]:
    heard: list[str] = []
    run = make_run(3, settings={"precision": precision})
    restore(run, folder, warn=heard.append)
    return heard


def saved(folder: Path) -> None:
    save_checkpoint(make_run(3, settings={"precision": "bf16"}), TrainState(1, 0), folder, 1)


def test_a_checkpoint_of_bf16_in_fp16_is_warned_about(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, saved, tmp_path)
    first, second = pool.run(2, warned, tmp_path, "fp16")
    assert len(first) == 1 and "trained in bf16" in first[0] and second == []
    assert pool.run(2, warned, tmp_path, "bf16") == [[], []]


def planned(folder: Path, precision: str) -> str:
    values = {
        "model": {"hf": str(folder)},
        "data": {"sequence_length": 8},
        "steps": 1,
        "batch_size": 1,
        "strategy": {"precision": precision, "zero_stage": 0, "activation_checkpointing": "none"},
    }
    recipe: Recipe = recipe_of(values, SETTINGS)
    return " ".join(plan_for(recipe, blueprint_of(recipe), cluster_of(recipe.cluster), compare=False).reasons)


def test_a_model_of_bf16_in_fp16_is_warned_about(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert "trained in bf16" in planned(tmp_path, "fp16")
    assert "trained in bf16" not in planned(tmp_path, "bf16")
