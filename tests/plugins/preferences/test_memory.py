"""Predicted memory of preference training against real steps, by objective and by where the reference is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.data import open_data
from shardwise.dryrun.run import dry_run
from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.batches import RankBatches
from shardwise.trainer.meter import MemoryMeter
from shardwise.trainer.precomputed import with_precomputed
from shardwise.trainer.warm_up import warm_kernels
from tests.harness.pool import Pool
from tests.harness.tiers import quick

LENGTH = 256
ADAPTER = {"adapter": {"rank": 8, "targets": "all"}}


def recipe_for(folder: Path, objective: Any, **sections: Any) -> Recipe:
    """Pairs that fill their rows; the plan counts on no shorter ones."""
    pairs = folder / "pairs.jsonl"
    answers = {side: letter * (LENGTH - 8) for side, letter in (("chosen", "a"), ("rejected", "b"))}
    rows = [{"prompt": f"{number:06}", **answers} for number in range(16)]
    pairs.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    values = {
        "model": {"layers": 4, "width": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 2048},
        "objective": objective,
        "data": {"source": str(pairs), "sequence_length": LENGTH, "held_out": 0},
        "steps": 4,
        "batch_size": 4,
        "cluster": {"device": "cpu", "devices_per_node": 2},
    }
    return recipe_of(values | sections, SETTINGS)


def measured(recipe: Recipe, settings: dict[str, Any]) -> int:
    """The peak of two steps above the level before the model."""
    device, strategy = torch.device("cpu"), strategy_from(settings)
    data, blueprint = open_data(recipe), blueprint_of(recipe)
    warm_kernels(device, strategy)
    meter = MemoryMeter(device)
    run = build(recipe, blueprint, strategy, device)
    with_precomputed(run, data, lambda line: None)
    batches = RankBatches(data, run)
    for index in range(2):
        step(run, batches.at(index), 1e-4)
        meter.sample()
    return meter.peak.allocated


CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    ("dpo", {"zero_stage": 3, "reference": "copy"}, {}),
    ({"name": "dpo", "reference_quantize": "nf4"}, {"zero_stage": 3, "reference": "copy"}, {}),
    ("dpo", {"zero_stage": 3, "reference": "precomputed"}, {}),
    ("ipo", {"zero_stage": 2, "reference": "adapter_off"}, ADAPTER),
    ("kto", {"zero_stage": 3, "reference": "copy"}, {}),
    ("orpo", {"zero_stage": 3}, {}),
    ("simpo", {"zero_stage": 1}, {}),
    ("cpo", {"tensor_parallel": 2}, {}),
    ("reward", {"zero_stage": 3}, {}),
]


@pytest.mark.parametrize(("objective", "settings", "sections"), quick(CASES, CASES[3]), ids=str)
def test_predicted_memory_is_that_of_real_steps(
    objective: Any,
    settings: dict[str, Any],
    sections: dict[str, Any],
    pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    recipe = recipe_for(tmp_path, objective, **sections)
    pinned = {"precision": "fp32", "micro_batch_size": 2, **settings}
    cluster = cluster_of(recipe.cluster)
    run = dry_run(recipe, blueprint_of(recipe), strategy_from(pinned), cluster)
    predicted = run.peak.bytes + cluster.device.overhead.workspace_bytes
    real = max(pool.run(2, measured, recipe, pinned, timeout=120))
    assert predicted == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(("packing", "rows"), [(False, 2), (True, 1)])
def test_a_plan_counts_the_tokens_of_both_answers(packing: bool, rows: int, tmp_path: Path) -> None:
    """A pair that is not packed is two rows: the tokens of a step, and the rates of plan and run, are those of both."""
    recipe = recipe_for(tmp_path, "orpo")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"packing": packing})})
    strategy = strategy_from({"precision": "fp32", "micro_batch_size": 2})
    prediction = predict(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), rank=0)
    assert prediction.step.tokens == recipe.batch_size * rows * LENGTH
