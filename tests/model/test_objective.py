"""An objective that counts other targets than the labels of the batch: the engine divides by its own number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardwise.engine.build import build
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch, Blueprint, LossSum, TrainingObjective
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from
from shardwise.verifier.reference import reference_model
from tests.harness.pool import Pool

LENGTH, ROWS = 16, 8
VALUES: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 2, "vocab": 256},
    "objective": {"factory": f"{__name__}:second_half"},
    "data": {"sequence_length": LENGTH},
    "steps": 1,
    "batch_size": ROWS,
}


class SecondHalf(TrainingObjective):
    """The next token in the second half of each sequence."""

    def count(self, blueprint: Blueprint, batch: Batch) -> Tensor:
        return (batch["labels"][:, LENGTH // 2 :] >= 0).sum()

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        logits = blueprint.logits(model, batch["input_ids"], batch.get("positions"))[:, LENGTH // 2 :]
        labels = batch["labels"][:, LENGTH // 2 :]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), self.count(
            blueprint, batch
        )


def second_half(recipe: Recipe) -> SecondHalf:
    return SecondHalf()


def tokens() -> Tensor:
    return torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def trained_rank(settings: dict[str, Any]) -> tuple[float, int, float]:
    """Loss, valid targets and gradient norm of one step."""
    recipe = recipe_of(VALUES, SETTINGS)
    strategy = strategy_from({"precision": "fp64", "micro_batch_size": 2, **settings})
    run = build(recipe, blueprint_of(recipe), strategy, torch.device("cpu"))
    mine = tokens()[run.data_rank :: run.data_degree]
    result = step(run, [{"input_ids": part, "labels": part} for part in mine.split(2)], 1e-2)
    return float(result.loss), int(result.tokens), float(result.grad_norm)


@pytest.mark.parametrize(
    "settings", [{"zero_stage": 3}, {"pipeline_parallel": 2}], ids=["zero 3", "pipeline"]
)
def test_the_engine_divides_by_the_objectives_own_number(settings: dict[str, Any], pool: Pool) -> None:
    """The mean and its gradient are those of plain torch on the whole batch."""
    blueprint = blueprint_of(recipe_of({**VALUES, "objective": None}, SETTINGS))
    model = reference_model(blueprint, 0, torch.float64)
    logits = blueprint.logits(model, tokens())[:, LENGTH // 2 :].flatten(0, 1)
    mean = cross_entropy(logits, tokens()[:, LENGTH // 2 :].flatten())
    mean.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for loss, targets, gradient in pool.run(2, trained_rank, settings):
        assert targets == ROWS * LENGTH // 2
        assert loss == pytest.approx(mean.item(), rel=1e-12)
        assert gradient == pytest.approx(float(norm), rel=1e-10)
