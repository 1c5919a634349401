"""Layer drop by Python's ``random``: all ranks run the same layers, in steps and in evaluations."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.checkpoint.run_folder import write_job
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, layout_of, strategy_from
from shardwise.trainer.loop import Job, Trainer
from tests.harness.modules import Batch, Items, Shapes
from tests.harness.plans import small_plan
from tests.harness.pool import Pool


class Dropping(nn.Module):
    """Each of its layers runs in about half of the passes, evaluations included."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.leave = nn.Linear(8, 1)

    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                x = x + layer(x).tanh()
        out: Tensor = self.leave(x)
        return out


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def dropping() -> tuple[nn.Module, Any, Any]:
    shapes: Shapes = {"x": ((8,), torch.float32), "y": ((1,), torch.float32)}
    return Dropping(), loss, Items(shapes)


def trained(job: Job) -> None:
    Trainer(job).train()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_drop_the_same_layers(pool: Pool, tmp_path: Path, stage: int) -> None:
    runs = []
    for ranks in (1, 2):
        recipe = recipe_of(
            {
                "model": {"factory": f"{__name__}:dropping"},
                "steps": 6,
                "batch_size": 12,
                "data": {"held_out": 0.25},
                "evaluation": {"every": 1},
                "cluster": {"device": "cpu", "devices_per_node": ranks},
                "optimizer": {"learning_rate": 1e-2},
                "strategy": {"precision": "fp64", "zero_stage": stage, "micro_batch_size": 12 // ranks},
            },
            SETTINGS,
        )
        strategy, folder = strategy_from(recipe.strategy), tmp_path / str(ranks)
        plan = replace(
            small_plan(), strategy=strategy, world_size=ranks, layout=layout_of(strategy, ranks),
            devices_per_node=ranks, allocated_bytes=dict.fromkeys(range(ranks), 1),
        )  # fmt: skip
        folder.mkdir()
        write_job(folder, recipe, plan)
        pool.run(ranks, trained, Job(recipe, plan, folder, torch.device("cpu")))
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        runs.append([(line["loss"], line["grad_norm"], line["held_out_loss"]) for line in lines])
    assert len(runs[0]) == 6
    assert torch.allclose(torch.tensor(runs[0]), torch.tensor(runs[1]), rtol=1e-10, atol=0)
