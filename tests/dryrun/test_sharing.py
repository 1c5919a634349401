"""One dry run for several devices of a kind equals a dry run for each."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.dryrun import run as dry_runs
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.dryrun.sharing import sharing_dry_runs
from shardwise.hardware.cluster import cluster_of
from shardwise.model.blueprint import Blueprint
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from

MODEL = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 1024, "context": 256}
DEVICES = ("B200-180GB", "A100-40GB", "B200-180GB")
"""All prefer FlashAttention."""
STRATEGY = strategy_from({"precision": "bf16", "zero_stage": 3})


def asked(device: str) -> Recipe:
    cluster = {"device": device, "devices_per_node": 2}
    values = {
        "model": MODEL,
        "data": {"sequence_length": 128},
        "steps": 1,
        "batch_size": 8,
        "cluster": cluster,
    }
    return recipe_of(values, SETTINGS)


def on(device: str, blueprint: Blueprint, rank: int = 0) -> DryRun:
    recipe = asked(device)
    return dry_run(recipe, blueprint, STRATEGY, cluster_of(recipe.cluster), rank=rank)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of all dry runs that are made."""
    ranks, counted = list[int](), dry_runs._run

    def run(*arguments: Any) -> DryRun:
        ranks.append(arguments[-1].rank)
        return counted(*arguments)

    monkeypatch.setattr(dry_runs, "_run", run)
    return ranks


def test_devices_of_a_kind_share_a_dry_run(made: list[int]) -> None:
    blueprint = blueprint_of(asked(DEVICES[0]))
    alone = [on(device, blueprint) for device in DEVICES]
    assert alone[0].replay != alone[1].replay, "workspaces differ: 64 and 16 MiB"
    made.clear()
    with sharing_dry_runs():
        shared = [on(device, blueprint) for device in DEVICES]
        on(DEVICES[0], blueprint, rank=1)
        assert made == [0, 1]
        on("H100-80GB", blueprint)
    for one, other in zip(alone, shared, strict=True):
        assert (one.peaks, one.cost, one.replay) == (other.peaks, other.cost, other.replay)
    assert made == [0, 1, 0], "cuDNN's attention allocates other tensors"
    on(DEVICES[0], blueprint)
    assert made == [0, 1, 0, 0], "outside of the block each call is a dry run"


def test_a_compiled_block_has_the_attention_of_its_own_device() -> None:
    """A process keeps compilations: those for an H100 call cuDNN's attention."""
    compiled = strategy_from({"precision": "bf16", "compile": "block"})
    for device, cudnn in (("H100-80GB", True), ("A100-40GB", False)):
        recipe = asked(device)
        run = dry_run(recipe, blueprint_of(recipe), compiled, cluster_of(recipe.cluster))
        assert any("cudnn" in kernel.operation for kernel in run.cost.kernels) == cudnn


def test_the_processor_shares_nothing(made: list[int]) -> None:
    """Its kernels depend on the number of processes of a node."""
    with sharing_dry_runs():
        for _ in range(2):
            on("cpu", blueprint_of(asked("cpu")))
    assert made == [0, 0]
