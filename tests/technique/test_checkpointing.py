"""Activation checkpointing: the same gradients to the bit, dropout on; less memory for less than a third more FLOPs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from shardwise.core.cluster import cluster_of
from shardwise.core.recipe import Recipe, recipe_of
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.engine.build import build
from shardwise.engine.optim.norm import local
from shardwise.engine.step import forward_backward
from shardwise.model.blueprint import blueprint_of
from shardwise.plan.search import RESERVE, plan_for
from shardwise.technique import SETTINGS, strategy_from
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING

DECODER = {"layers": 6, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 512, "context": 64}


class Dropped(nn.Module):
    """Blocks with dropout, which must drop the same elements when they run again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16)) for _ in range(3)
        )

    def units(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def dropped() -> Any:
    """A factory: model and loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = batch["input_ids"].float().unsqueeze(-1).expand(-1, -1, 16) / 8
        return model(x).square().sum(), (batch["labels"] != -100).sum()

    return Dropped(), loss


def recipe(model: dict[str, Any], **values: Any) -> Recipe:
    return recipe_of(
        {"model": model, "data": {"sequence_length": 32}, "steps": 1, "batch_size": 4, **values}, SETTINGS
    )


def gradients(settings: dict[str, Any]) -> list[Tensor]:
    sys.path.insert(0, str(Path(__file__).parent))
    asked = recipe({"factory": f"{Path(__file__).stem}:dropped"})
    blueprint = blueprint_of(asked)
    run = build(asked, blueprint, strategy_from(settings), torch.device("cpu"))
    torch.manual_seed(11)
    tokens = torch.arange(32).repeat(2, 1)
    forward_backward(run, [{"input_ids": tokens, "labels": tokens}] * 2)
    return [local(p.grad).clone() for p in run.model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3), (2, 1)])
def test_gradients_are_bit_identical_with_dropout(world: int, stage: int, pool: Pool) -> None:
    plain, again = (
        pool.run(world, gradients, {"zero_stage": stage, "activation_checkpointing": kind})
        for kind in ("none", "full")
    )
    for mine, theirs in zip(again, plain, strict=True):
        assert len(mine) == 12
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert any(a.abs().sum() > 0 for a in mine)


def counted(kind: str, **settings: Any) -> DryRun:
    asked = recipe(DECODER, cluster={"preset": "1xH100-80GB"})
    strategy = strategy_from({"micro_batch_size": 4, "activation_checkpointing": kind, **settings})
    return dry_run(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster))


def test_it_recomputes_one_forward_pass_of_the_blocks() -> None:
    plain, full = counted("none"), counted("full")
    assert full.cost.model_flops == plain.cost.model_flops
    extra = (full.cost.flops - plain.cost.flops) / plain.cost.model_flops
    assert 0.15 < extra <= 0.334


def test_it_keeps_one_input_per_block_and_one_block() -> None:
    plain, full = counted("none"), counted("full")
    one_input = 4 * 32 * 64 * 4
    saved = plain.peaks["forward"].ledger.activations - full.peaks["forward"].ledger.activations
    kept_per_block = (plain.peaks["forward"].ledger.activations - saved) / 6
    assert saved > 0.5 * plain.peaks["forward"].ledger.activations
    assert kept_per_block < 4 * one_input, "its input, and its share of embedding, logits and batch"
    assert full.peak.bytes < plain.peak.bytes


def test_it_sends_nothing_more() -> None:
    asked = recipe(DECODER, cluster={"preset": "4xH100-80GB"})
    blueprint, cluster = blueprint_of(asked), cluster_of(asked.cluster)
    traffic = [
        dry_run(asked, blueprint, strategy_from({"zero_stage": 3, "activation_checkpointing": kind}), cluster)
        for kind in ("none", "full")
    ]
    assert traffic[0].cost.traffic_by_axis() == traffic[1].cost.traffic_by_axis()


def test_the_planner_reaches_for_it_when_nothing_plainer_fits() -> None:
    limit = counted("none").peak.bytes - 1
    overhead = cluster_of(recipe(DECODER, cluster={"preset": "1xH100-80GB"}).cluster).device.overhead
    total = limit + overhead.workspace_bytes + overhead.outside_allocator(0)
    cluster = {"preset": "1xH100-80GB", "memory_gib": total / 2**30 / (1 - RESERVE["cuda"])}
    asked = recipe(DECODER, cluster=cluster, strategy={"micro_batch_size": 4})
    plan = plan_for(asked, blueprint_of(asked), cluster_of(asked.cluster))
    assert plan.fits
    assert plan.strategy[ACTIVATION_CHECKPOINTING] == "full"
    assert "full" in plan.line
