"""Every technique, alone and in pairs: it trains as one plain process does, and takes the memory it was planned.

The rows are made from the techniques' own settings, so a new technique is covered here the day it is added to
``technique.ORDER``.
"""

from __future__ import annotations

import functools
import math
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import Row, covering_rows
from pool import Pool

from shardwise.core.cluster import cluster_of
from shardwise.core.recipe import Recipe, recipe_of
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.engine.step import step
from shardwise.model.blueprint import blueprint_of
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    ORDER,
    SETTINGS,
    broken_rules,
    layout_of,
    micro_batches,
    strategy_from,
)
from shardwise.train.meter import MemoryMeter
from shardwise.train.verify import Verdict, run_reference, run_strategy
from shardwise.train.warm import warm_kernels

FACTORS: dict[str, list[Any]] = {
    setting.key: list(setting.examples) or [1, 2]
    for technique in ORDER
    for setting in technique.settings
    if len(setting.choices) != 1
}
# On the CPU, where the host's memory is the device's, only files take anything out of it; tests/technique/ tells the
# two apart. Of the values that are joined, one with everything stands for all.
FACTORS["offload"] = ["none", "activations", "optimizer", "nvme:/tmp", "activations+parameters+nvme:/tmp"]
FACTORS["offload_fraction"] = [1.0, 0.5]
FACTORS["optimizer"] = ["adamw", "sgd", "adamw_8bit"]
PARITY_FACTORS = {
    **FACTORS,
    "world_size": [1, 2, 4],
    MICRO_BATCH_SIZE.key: [1, 2],
    "model": ["llama", "gpt2", "tied", "sixteens"],
}
# Dimensions that no world size divides; a batch of 7 leaves ranks and micro-batches with unequal counts. In the
# last every linear layer can run in 8 bits, with biases and with tokens that are no multiple of 16.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"layers": 2, "width": 44, "heads": 2, "kv_heads": 1, "ffn": 55, "vocab": 257, "context": 32},
    "gpt2": {"family": "gpt2", "layers": 2, "width": 42, "heads": 3, "ffn": 51, "vocab": 263, "context": 32},
    "tied": {
        "layers": 3,
        "width": 36,
        "heads": 3,
        "kv_heads": 3,
        "ffn": 49,
        "vocab": 269,
        "context": 32,
        "tied": True,
    },
    "sixteens": {
        "family": "gpt2",
        "layers": 2,
        "width": 48,
        "heads": 3,
        "ffn": 80,
        "vocab": 271,
        "context": 32,
    },
}
STEPS = 20


def valid(row: Row) -> bool:
    """Whether the strategy of a row breaks no rule."""
    recipe = recipe_for_rules(row.get("optimizer", "adamw"), row.get("optimizer_in_backward", False))
    return not any(broken_rules(strategy_from(settings_of(row)), row.get("world_size", 4), recipe))


@functools.cache
def recipe_for_rules(optimizer: str, in_backward: bool) -> Recipe:
    row = {"optimizer": optimizer, "optimizer_in_backward": in_backward}
    values = {
        "model": MODELS["llama"] | {"context": 256},
        "steps": 1,
        "batch_size": 1,
        "optimizer": optimizer_of(row),
    }
    return recipe_of(values, SETTINGS)


def optimizer_of(row: Row) -> dict[str, Any]:
    """The recipe's optimizer section: clipped wherever clipping is possible.

    SGD's rate is below its edge of stability, beyond which gradient norms tell the dtype's noise many times over.
    """
    rate = 0.02 if row.get("optimizer") == "sgd" else 1e-3
    clip = None if row.get("optimizer_in_backward") else 1.0
    return {"name": row.get("optimizer", "adamw"), "learning_rate": rate, "clip_norm": clip}


def settings_of(row: Row) -> dict[str, Any]:
    return {s.key: row[s.key] for s in SETTINGS if s.key in row}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8,000 words drawn by Zipf's law from 300: the same on every machine, and rare ones among them."""
    chance = random.Random(0)
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 9))) for _ in range(300)]
    drawn = chance.choices(words, weights=[1 / rank for rank in range(1, 301)], k=8000)
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(" ".join(drawn), encoding="utf-8")
    return path


def parity_recipe(row: Row, corpus: Path) -> Recipe:
    values = {
        "model": MODELS[row["model"]],
        "data": {"source": str(corpus), "sequence_length": 24},
        "steps": STEPS,
        "batch_size": 7,
        "optimizer": optimizer_of(row),
    }
    return recipe_of(values, SETTINGS)


def reference_rank(recipe: Recipe, settings: dict[str, Any], folder: Path) -> None:
    run_reference(recipe, strategy_from(settings), folder)


def strategy_rank(recipe: Recipe, settings: dict[str, Any], folder: Path) -> Verdict:
    return run_strategy(recipe, strategy_from(settings), folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(pool: Pool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder with the plain process's losses and weights, for a row; each distinct one trained once."""
    folders: dict[tuple[Any, ...], Path] = {}

    def trained(row: Row) -> Path:
        precision = "fp64" if row["precision"] == "fp64" else "fp32"
        kind = (row["model"], precision, *optimizer_of(row).values())
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("reference")
            settings = {"precision": precision, MICRO_BATCH_SIZE.key: 7}
            pool.run(1, reference_rank, parity_recipe(row, corpus), settings, folders[kind])
        return folders[kind]

    return trained


def name_of(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


@pytest.mark.parametrize("row", covering_rows(PARITY_FACTORS, valid), ids=name_of)
def test_trains_as_one_plain_process(row: Row, pool: Pool, corpus: Path, reference: Any) -> None:
    """Loss, gradient norm and weights over 20 steps: 1e-10 in fp64, 1e-5 in fp32, wider where bits are given up."""
    folder, recipe = reference(row), parity_recipe(row, corpus)
    verdicts = pool.run(row["world_size"], strategy_rank, recipe, settings_of(row), folder, timeout=240)
    assert verdicts[0].steps == STEPS
    assert all(v == verdicts[0] for v in verdicts)
    assert verdicts[0].passed, verdicts[0]


LEDGER_MODEL = {
    "layers": 8,
    "width": 384,
    "heads": 6,
    "kv_heads": 2,
    "ffn": 1024,
    "vocab": 2048,
    "context": 256,
}


def ledger_recipe(world_size: int, row: Row, **sections: Any) -> Recipe:
    values = {
        "model": LEDGER_MODEL,
        # The CPU computes fp16 products at a hundredth of the speed of others: fewer tokens for them.
        "data": {"sequence_length": 48 if row.get("precision") == "fp16" else 192},
        "steps": 3,
        "batch_size": 4 * world_size,
        "optimizer": optimizer_of(row),
        "cluster": {"devices_per_node": world_size},
    }
    return recipe_of(values | sections, SETTINGS)


def measured_rank(recipe: Recipe, settings: dict[str, Any]) -> int:
    """Two real steps on random tokens; the peak above the level before the model."""
    device, strategy = torch.device("cpu"), strategy_from(settings)
    blueprint = blueprint_of(recipe)
    warm_kernels(device, strategy)
    meter = MemoryMeter(device)
    run = build(recipe, blueprint, strategy, device)
    snapshots: Snapshots[int] | None = snapshots_of(run)
    if snapshots is not None:
        snapshots.begin(0)
    count = micro_batches(strategy, run.layout, recipe.batch_size)
    shape = (strategy[MICRO_BATCH_SIZE], recipe.data.sequence_length)
    for _ in range(2):
        tokens = [torch.randint(0, 2048, shape) for _ in range(count)]
        step(run, [{"input_ids": t, "labels": t} for t in tokens], 1e-4)
        meter.sample()
    return meter.peak.allocated


@pytest.mark.parametrize("row", covering_rows({**FACTORS, "accumulate": [1, 2]}, valid), ids=name_of)
def test_takes_the_memory_it_was_planned(row: Row, pool: Pool) -> None:
    """Predicted peak against the operating system's figure, every rank: 5 %."""
    world_size = 2 * row.get("replicate", 1)
    recipe = ledger_recipe(world_size, row)
    agrees(recipe, {**settings_of(row), MICRO_BATCH_SIZE.key: 4 // row["accumulate"]}, world_size, pool)


@pytest.mark.parametrize("stage", [1, 3])
def test_snapshots_take_the_memory_they_were_planned(stage: int, pool: Pool) -> None:
    """On the CPU the host's memory is the device's, so the plan counts them."""
    recipe = ledger_recipe(2, {}, guard={"snapshot_every": 2})
    run = agrees(recipe, {"zero_stage": stage, MICRO_BATCH_SIZE.key: 2}, 2, pool)
    ledger = run.peak.ledger
    state = ledger.optimizer_state + 4 * run.parameters // 2  # what lies between two steps is sharded
    assert ledger.overhead == pytest.approx(2 * state, rel=0.02)


def agrees(recipe: Recipe, settings: dict[str, Any], world_size: int, pool: Pool) -> DryRun:
    """Predicted peak against the operating system's figure, every rank; the prediction."""
    strategy, cluster = strategy_from(settings), cluster_of(recipe.cluster)
    assert layout_of(strategy, world_size).world_size == world_size
    measured = pool.run(world_size, measured_rank, recipe, settings, timeout=240)
    run = dry_run(recipe, blueprint_of(recipe), strategy, cluster)
    predicted = run.peak.bytes + cluster.device.overhead.workspace_bytes
    for rank, peak in enumerate(measured):
        error = predicted / peak - 1
        assert math.fabs(error) <= 0.05, (
            f"rank {rank}: predicted {predicted:,}, measured {peak:,}, {error:+.1%}"
        )
    return run
