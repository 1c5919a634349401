"""Gradient norms of micro-batches, measured between two steps of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.errors import RecipeError
from shardwise.core.run_files import GradientNoise, StepRecord
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.report.record import read_run
from shardwise.technique import SETTINGS, strategy_from
from shardwise.train.loop import Job, Trainer
from shardwise.train.noise import gradient_noise
from tests.harness.plans import small_plan
from tests.harness.pool import Pool
from tests.harness.tiny_run import full


def recipe(corpus: Path, noise: bool, micro: int = 1, **strategy: Any) -> Recipe:
    corpus.write_text("all work and no play makes a dull run\n" * 200, encoding="utf-8")
    values: dict[str, Any] = {
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16},
        "data": {"source": str(corpus), "sequence_length": 16},
        "steps": 3,
        "batch_size": 4,
        "optimizer": {"clip_norm": None},
        "strategy": {"micro_batch_size": micro, **strategy},
        "evaluation": {"every": 1, "sequences": 2, "noise_scale": noise},
    }
    return recipe_of(values, SETTINGS)


def trained(recipe: Recipe, folder: Path, micro_batches: int) -> tuple[StepRecord, ...]:
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy), micro_batches=micro_batches)
    folder.mkdir(exist_ok=True)
    write_job(folder, recipe, plan)
    Trainer(Job(recipe, plan, folder, torch.device("cpu"))).train()
    return read_run(folder).steps


def both(recipes: list[Recipe], folder: Path, micro_batches: int) -> list[tuple[StepRecord, ...]]:
    return [trained(each, folder / str(index), micro_batches) for index, each in enumerate(recipes)]


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, {"zero_stage": 0}), (2, {"zero_stage": 3}), (1, {"zero_stage": 0, "optimizer_in_backward": True})],
)
def test_a_run_is_the_same_with_and_without_the_measurement(
    ranks: int, strategy: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    recipes = [recipe(corpus, noise, **strategy) for noise in (False, True)]
    plain, measured = pool.run(ranks, both, recipes, tmp_path, 4 // ranks)[0]
    assert [step.loss.hex() for step in plain] == [step.loss.hex() for step in measured]
    assert [step.grad_norm.hex() for step in plain] == [step.grad_norm.hex() for step in measured]
    assert all(step.gradient_noise is None for step in plain)
    for step in measured:
        noise = step.gradient_noise
        assert noise is not None
        assert (noise.micro_batch_tokens, noise.batch_tokens) == (16 * ranks, 64)
        assert 0 < noise.batch_square < noise.micro_batch_square


def against_autograd(recipe: Recipe, folder: Path) -> tuple[GradientNoise, float, float]:
    plan = replace(small_plan(), strategy=strategy_from(recipe.strategy), micro_batches=4)
    folder.mkdir()
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    batches = trainer.batches.at(0)
    found = gradient_noise(trainer.run, batches)
    flat = []
    for batch in batches:
        loss, count = trainer.run.blueprint.loss(trainer.run.model, batch)
        (loss / count).backward()
        grads = [full(p.grad) for p in trainer.run.model.parameters() if p.grad is not None]
        flat.append(torch.cat([grad.flatten() for grad in grads]).double())
        trainer.run.model.zero_grad(set_to_none=True)
    gradients = torch.stack(flat)
    return found, float(gradients.square().sum(1).mean()), float(gradients.mean(0).square().sum())


def test_the_norms_are_those_of_autograd(pool: Pool, tmp_path: Path) -> None:
    [(found, small, big)] = pool.run(
        1, against_autograd, recipe(tmp_path / "c.txt", True, zero_stage=2), tmp_path / "run"
    )
    assert found.micro_batch_square == pytest.approx(small, rel=1e-5)
    assert found.batch_square == pytest.approx(big, rel=1e-5)


def test_one_micro_batch_is_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="one micro-batch"):
        pool.run(1, trained, recipe(tmp_path / "c.txt", True, 4, zero_stage=0), tmp_path / "run", 1)
