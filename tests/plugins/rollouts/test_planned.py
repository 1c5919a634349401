"""Predicted memory of rollout and update against real steps; what generation adds to the time of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.sampling import SamplingObjective
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import strategy_from
from shardwise.trainer.meter import MemoryMeter
from shardwise.trainer.warm_up import warm_kernels
from tests.harness.pool import Pool
from tests.plugins.rollouts.rollout_runs import Prompts, rollout_recipe

PROMPT, COMPLETION, WIDTH, VOCAB, ROWS = 6, 10, 512, 2048, 256
MODEL = {"layers": 4, "width": WIDTH, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": VOCAB}
SETTINGS: dict[str, Any] = {"precision": "fp32", "micro_batch_size": 32}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that fill their room; the plan counts on no shorter ones."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"prompt": f"say {i:02}".ljust(PROMPT - (i == 0), ".")} for i in range(24)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def recipe_of_run(
    source: Path,
    name: str,
    world: int,
    rows: int = ROWS,
    completion: int = COMPLETION,
    values: dict[str, Any] | None = None,
    **objective: Any,
) -> Recipe:
    return rollout_recipe(
        source,
        name,
        {"completion_length": completion, **objective},
        data={
            "source": str(source),
            "format": "prompt",
            "sequence_length": PROMPT + completion,
            "held_out": 0,
        },
        batch_size=rows,
        cluster={"device": "cpu", "devices_per_node": world},
        **{"model": MODEL, **(values or {})},
    )


def planned(recipe: Recipe, settings: dict[str, Any], **values: Any) -> DryRun:
    strategy = strategy_from({**SETTINGS, **settings})
    return dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), **values)


def measured(recipe: Recipe, settings: dict[str, Any]) -> int:
    """The peak of a step and the next rollout above the level before the model. No completion ends early."""
    from shardwise.data import open_data

    device, strategy = torch.device("cpu"), strategy_from({**SETTINGS, **settings})
    prompts = Prompts(open_data(recipe))
    prompts.tokenizer.ends = frozenset({-1})
    blueprint = blueprint_of(recipe)
    warm_kernels(device, strategy, objective=blueprint.minimises)
    meter = MemoryMeter(device)
    run = build(recipe, blueprint, strategy, device)
    assert isinstance(run.objective, SamplingObjective)
    rollouts = run.objective.batches(run, prompts)
    step(run, rollouts.at(0), 1e-4)
    rollouts.at(1)
    meter.sample()
    return meter.peak.allocated


MIXTURE: dict[str, Any] = {**MODEL, "ffn": 512, "experts": 4, "experts_per_token": 2}
ADAPTER: dict[str, Any] = {"rank": 8, "targets": "all"}
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("grpo", 2, {"zero_stage": 3}, {"beta": 0.04}, {}),
    ("rloo", 2, {"zero_stage": 2}, {"beta": 0.04}, {"adapter": ADAPTER}),
    ("ppo", 2, {"zero_stage": 3, "micro_batch_size": 64}, {"beta": 0.0, "epochs": 1}, {}),
    ("grpo", 2, {"zero_stage": 3, "expert_parallel": 2}, {"beta": 0.04}, {"model": MIXTURE}),
    ("grpo", 2, {"zero_stage": 3, "sequence_parallel": 2}, {"beta": 0.04}, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "world", "settings", "objective", "values"), CASES, ids=str)
def test_predicted_memory_is_that_of_real_steps(
    pool: Pool,
    source: Path,
    name: str,
    world: int,
    settings: dict[str, Any],
    objective: dict[str, Any],
    values: dict[str, Any],
) -> None:
    recipe = recipe_of_run(source, name, world, values=values, **objective)
    predicted = planned(recipe, settings)
    real = max(pool.run(world, measured, recipe, settings, timeout=300))
    workspace = cluster_of(recipe.cluster).device.overhead.workspace_bytes
    assert predicted.peak.bytes + workspace == pytest.approx(real, rel=0.02)


def test_the_peak_of_generation_has_the_whole_cache(source: Path) -> None:
    """Keys and values of all rows of a rank, and no longer than for the rollout."""
    long = 58
    small, large = (planned(recipe_of_run(source, "grpo", 1, rows, long), {}) for rows in (ROWS // 2, ROWS))
    cache = ROWS // 2 * 2 * 4 * WIDTH * (PROMPT + long) * 4
    grown = large.peaks["rollout"].bytes - small.peaks["rollout"].bytes
    assert grown == pytest.approx(cache, rel=0.15)  # and the activations of one token, and logits
    assert grown >= cache
    assert large.peaks["backward"].bytes - small.peaks["backward"].bytes < ROWS // 2 * 1024 * 4


def test_generation_costs_one_pass_per_token(source: Path) -> None:
    """The output layer's products with one token of all rows: as many as tokens of a completion."""
    run = planned(recipe_of_run(source, "grpo", 1), {})
    rollout = [kernel for kernel in run.cost.kernels if kernel.phase == "rollout" and kernel.flops]
    logits = [kernel for kernel in rollout if kernel.flops == 2 * ROWS * WIDTH * VOCAB]
    assert sum(kernel.calls for kernel in logits) == COMPLETION
    ppo = planned(recipe_of_run(source, "ppo", 1, beta=0.0, epochs=4), {"micro_batch_size": 8})
    logits = [k for k in ppo.cost.kernels if k.phase == "rollout" and k.flops == 2 * ROWS * WIDTH * VOCAB]
    assert sum(kernel.calls for kernel in logits) == COMPLETION / 4  # a rollout is for four steps
