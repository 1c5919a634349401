"""A user's loss that fails only in evaluation ends the run before its first step, not after its last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.errors import ShardwiseError
from shardwise.core.plan import Plan
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.loop import Job, Trainer
from tests.harness.plans import small_plan
from tests.harness.pool import Pool

MODEL = """
import torch
from torch import nn


def loss(model, batch):
    total = (model(batch["x"]) ** 2).sum()
    return total, len(batch["labels"])


def breaks_in_evaluation(model, batch):
    if not model.training:
        raise KeyError("teacher")
    return loss(model, batch)


def data():
    return [{"x": torch.full((4,), float(i)), "labels": torch.tensor(0)} for i in range(40)]


def good():
    return nn.Linear(4, 1), loss, data


def bad():
    return nn.Linear(4, 1), breaks_in_evaluation, data
"""

BAD = "the batch has no 'teacher', which the loss reads"


def train(recipe: Recipe, plan: Plan, folder: Path) -> str:
    try:
        Trainer(Job(recipe, plan, folder, torch.device("cpu"))).train()
    except ShardwiseError as error:
        return error.what
    return ""


@pytest.mark.parametrize(("function", "fails"), [("good", ""), ("bad", BAD)])
def test_evaluation_is_rehearsed(
    function: str, fails: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rehearsed.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    values = {
        "model": {"factory": f"rehearsed:{function}"},
        "steps": 3,
        "batch_size": 4,
        "data": {"held_out": 0.2},
        "strategy": {"zero_stage": 0, "micro_batch_size": 2},
    }
    recipe = recipe_of(values, SETTINGS)
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy))
    folder = tmp_path / "run"
    folder.mkdir()
    write_job(folder, recipe, plan)
    assert pool.run(1, train, recipe, plan, folder) == [fails]
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == (0 if fails else 3), "training began"
    assert (folder / "checkpoints" / "step-3").is_dir() == (not fails), (
        "a count that is a number lost the run"
    )
