"""Training with PEFT's options for single layers and whole modules, against a plain loop around PEFT's own model.

Four steps of AdamW with clipping in fp64, from the same files: in one process, sharded, and divided by layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from shardwise.checkpoint.adapter import gathered_adapter
from shardwise.engine.build import build
from shardwise.engine.run_state import parameters_of
from shardwise.engine.step import step
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.pool import Pool
from tests.harness.tiers import quick

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

STEPS, RATE = 4, 1e-2
SMALL = {
    "vocab_size": 34, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.08, "tie_word_embeddings": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ranks and alphas": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 1, "layers.1.self_attn.q_proj": 6},
        "alpha_pattern": {"layers.0.*": 20},
    },
    "modules to save": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens", "model.norm"]},
    "layers to transform": {"target_modules": ["k_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "output layer": {"target_modules": ["lm_head", "o_proj"]},
    "bias of B": {"target_modules": ["q_proj"], "lora_bias": True},
    "rslora and dora": {
        "target_modules": ["gate_proj"],
        "use_rslora": True,
        "use_dora": True,
        "rank_pattern": {"layers.2.*": 7},
    },
}  # fmt: skip
RENAMED = {"target_modules": "targets", "use_rslora": "rank_stabilized"}
NO_TENSOR_PARALLEL = ("output layer", "bias of B", "rslora and dora")  # refused, by a rule or by the plan


def tokens() -> Tensor:
    return torch.randint(34, (4, 17), generator=torch.Generator().manual_seed(3))


def opened(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)


def trained_by_peft(base: Path, start: Path) -> dict[str, Tensor]:
    """PEFT's own file after the steps, by its names without the prefix."""
    model = peft.PeftModel.from_pretrained(
        opened(base), str(start), is_trainable=True, autocast_adapter_dtype=False
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    ids = tokens()
    for _ in range(STEPS):
        logits = model(input_ids=ids[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(start.parent / "trained"))
    file = load_file(start.parent / "trained" / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in file.items()}


def trained_rank(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Tensor]:
    recipe = recipe_of(values, SETTINGS)
    run = build(recipe, blueprint_of(recipe), strategy_from(settings), torch.device("cpu"))
    mine = tokens()[run.data_rank :: run.data_degree]
    for _ in range(STEPS):
        step(run, [{"input_ids": mine[:, :-1], "labels": mine[:, 1:]}], RATE)
    return gathered_adapter(run, parameters_of(run))


@pytest.mark.parametrize("name", quick(CASES, "ranks and alphas", "modules to save", "rslora and dora"))
def test_trains_what_peft_trains(name: str, pool: Pool, tmp_path: Path) -> None:
    base, start, options = tmp_path / "base", tmp_path / "start", CASES[name]
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).double().save_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(opened(base), config, autocast_adapter_dtype=False)
    model.save_pretrained(str(start))
    expected = trained_by_peft(base, start)

    section = {RENAMED.get(key, key): value for key, value in options.items() if key != "use_dora"}
    if options.get("use_dora"):
        section["name"] = "dora"
    values = {
        "model": {"hf": str(base)}, "data": {"sequence_length": 16}, "steps": STEPS, "batch_size": 4,
        "adapter": {"rank": 4, "alpha": 8.0, "start_from": str(start), **section},
        "optimizer": {"betas": [0.9, 0.95], "epsilon": 1e-5, "weight_decay": 0.0, "clip_norm": 1.0},
    }  # fmt: skip
    layouts: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"zero_stage": 3})]
    if name not in NO_TENSOR_PARALLEL:
        layouts.append((2, {"tensor_parallel": 2}))
    trained = {key: value for key, value in expected.items() if ".base_layer." not in key}
    for world, settings in layouts:
        found = pool.run(world, trained_rank, values, {"precision": "fp64", **settings}, timeout=120)[0]
        assert found.keys() == trained.keys()
        apart = {key: float((found[key] - value).abs().max()) for key, value in trained.items()}
        assert max(apart.values()) <= 1e-10, (settings, apart)
    first = load_file(start / "adapter_model.safetensors")
    moved = [key for key in trained if not torch.equal(first[f"base_model.model.{key}"], trained[key])]
    assert len(moved) == len(trained), "every tensor is trained"
