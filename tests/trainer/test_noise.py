"""Gradient norms of micro-batches, measured between two steps of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.run_files import GradientNoise, StepRecord
from shardwise.data import open_data
from shardwise.engine.build import build
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.noise_scale import noise_scale
from shardwise.recipe.sections import Recipe
from shardwise.report.record import read_run
from shardwise.technique import SETTINGS, strategy_from
from shardwise.trainer.loop import Job, Trainer
from shardwise.trainer.noise import gradient_noise
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


# -- a loss whose noise scale is known ---------------------------------------------------------------

WIDTH, LENGTH, ROWS, SIGMA = 100, 32, 32, 1.0


class Answers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Records of 1 to 32 targets after a prompt, mostly of few. The gradient of a target is 1 plus noise per weight."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(index)
        count = 1 + int(LENGTH * float(torch.rand((), generator=chance)) ** 4)
        labels = torch.full((LENGTH,), -100).index_fill(0, torch.arange(LENGTH - count, LENGTH), 0)
        noise = SIGMA * WIDTH**0.5 * torch.randn(LENGTH, WIDTH, generator=chance)
        return {"labels": labels, "gradients": 1 + noise}


class Line(nn.Module):
    """One weight per direction, multiplied by gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, gradients: Tensor) -> Tensor:
        return gradients @ self.weight


def line() -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        valid = batch["labels"] != -100
        return model(batch["gradients"]).where(valid, 0.0).sum(), valid.sum()

    return Line(), loss, Answers


def measured(micro: int, steps: int) -> list[GradientNoise]:
    values: dict[str, Any] = {
        "model": {"factory": f"{__name__}:line"},
        "steps": steps,
        "batch_size": ROWS,
    }
    known = recipe_of(values, SETTINGS)
    blueprint, strategy = blueprint_of(known), strategy_from({"zero_stage": 2, "micro_batch_size": micro})
    run, data = build(known, blueprint, strategy, torch.device("cpu")), open_data(known, blueprint.dataset)
    return [
        gradient_noise(run, data.micro_batches(index, run.data_rank, run.data_degree, micro))
        for index in range(steps)
    ]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "micro"), [(2, 8), (1, 4), (1, 1), (2, 1), (2, 2)])
def test_micro_batches_of_unequal_targets_have_the_true_noise_scale(
    ranks: int, micro: int, pool: Pool
) -> None:
    """|G|^2 is WIDTH, and a target's variance SIGMA^2 WIDTH^2: B_noise is 100 targets; a batch has about 220."""
    measurements, *others = pool.run(ranks, measured, micro, 240)
    assert all(other == measurements for other in others)
    found = noise_scale(measurements)
    assert found is not None and found.measurements == 120
    assert found.variance == pytest.approx(SIGMA**2 * WIDTH**2, rel=0.05)
    assert found.tokens == pytest.approx(SIGMA**2 * WIDTH, rel=0.05)
    assert found.batch_tokens == pytest.approx(ROWS * 7, rel=0.1)


def test_micro_batches_without_targets_are_left_out(pool: Pool) -> None:
    """A rank whose share is padding, and data that has no target at all."""
    [(some, none)] = pool.run(1, with_empty_batches)
    assert (some.micro_batch_tokens, some.batch_tokens) == (4.0, 8)
    assert some.micro_batch_square == pytest.approx(some.batch_square) and some.batch_square > 0
    assert noise_scale([none]) is None and none.batch_tokens == 0


def with_empty_batches() -> tuple[GradientNoise, GradientNoise]:
    known = recipe_of({"model": {"factory": f"{__name__}:line"}, "steps": 1, "batch_size": 1}, SETTINGS)
    run = build(known, blueprint_of(known), strategy_from({}), torch.device("cpu"))
    full = {"labels": torch.zeros(1, 4).long(), "gradients": torch.ones(1, 4, WIDTH)}
    empty = {**full, "labels": torch.full((1, 4), -100)}
    return gradient_noise(run, [full, empty, full]), gradient_noise(run, [empty, empty])
