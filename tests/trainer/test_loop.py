"""One step of the loop runs the functions that benchmarks/house.py counts, and no others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import shardwise
from benchmarks import house
from shardwise.checkpoint.run_folder import write_job
from shardwise.core.plan import Plan
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.loop import Job, Trainer
from tests.harness.plans import small_plan
from tests.harness.pool import Pool

PACKAGE = Path(shardwise.__file__).parent
ROOMS = ("engine/", "trainer/")


def functions_of_a_step(recipe: Recipe, plan: Plan, folder: Path) -> set[tuple[str, str]]:
    """(file, function) of the loop and of the engine, called in the second of three steps."""
    trainer, found = Trainer(Job(recipe, plan, folder, torch.device("cpu"))), set[tuple[str, str]]()
    issue = trainer._issue

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and path.is_relative_to(PACKAGE) and "<" not in name:
            found.add((path.relative_to(PACKAGE).as_posix(), name))

    def traced(index: int, batches: Any) -> Any:
        sys.setprofile(note if index == 1 else None)
        try:
            return issue(index, batches)
        finally:
            sys.setprofile(None)

    trainer._issue = traced  # type: ignore[method-assign]
    trainer.train()
    return {(file, name) for file, name in found if file.startswith(ROOMS)}


def listed(path: dict[str, str]) -> set[tuple[str, str]]:
    return {(file, name) for file, names in path.items() for name in names.split()}


def test_a_step_runs_the_functions_that_are_counted(pool: Pool, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all work and no play\n" * 200, encoding="utf-8")
    values: dict[str, Any] = {
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16},
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": 3,
        "batch_size": 2,
        "strategy": {"zero_stage": 3, "micro_batch_size": 1},
    }
    recipe = recipe_of(values, SETTINGS)
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy))
    folder = tmp_path / "run"
    folder.mkdir()
    write_job(folder, recipe, plan)
    [found] = pool.run(1, functions_of_a_step, recipe, plan, folder)
    entry = {("trainer/loop.py", "Trainer._steps")}
    assert entry | found == listed(house.STEP) | listed(house.MONITORS)
    assert not listed(house.STEP) & listed(house.MONITORS)
