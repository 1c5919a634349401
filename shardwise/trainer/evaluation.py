"""The validation loss: the training loss on held-out data, without gradients, over all ranks; and own metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwise.core import heartbeat
from shardwise.core.errors import RecipeError
from shardwise.engine.run import Run
from shardwise.engine.run_state import share_buffers
from shardwise.engine.seeding import seed_step
from shardwise.engine.train_state import Best
from shardwise.model.blueprint import Batch
from shardwise.recipe.sections import Recipe
from shardwise.runtime.generators import generators_kept
from shardwise.trainer.predictions import Predictions


@torch.no_grad()
def evaluate(run: Run, batches: Sequence[Batch], predictions: Predictions | None = None) -> float:
    """Mean loss per valid target over the batches of all data-parallel ranks, in nats. NaN without targets.

    A model that draws random numbers draws the same ones in every evaluation.

    Args:
        predictions: collects what the model returns.
    """
    share_buffers(run)
    run.model.eval()
    with generators_kept(run.device):
        seed_step(0, 0, run.random_rank)
        total = run.passes.evaluate(_Marked(batches, predictions))
        # Experts without room have left out tokens: the loss counts only when all of them had room.
        while run.exceeded():
            total = run.passes.evaluate(_Marked(batches, predictions))
    run.model.train()
    loss_sum, targets = total.tolist()  # waits for the device
    return loss_sum / targets if targets else math.nan


class _Marked(list[Batch]):
    """Batches that count as progress when they are read, one after the other."""

    def __init__(self, batches: Sequence[Batch], predictions: Predictions | None) -> None:
        super().__init__(batches)
        self._predictions = predictions

    def __iter__(self) -> Iterator[Batch]:
        batches = list(super().__iter__())
        for batch in batches if self._predictions is None else self._predictions.watch(batches):
            heartbeat.mark()
            yield batch


def best_of(recipe: Recipe, best: Best | None, step: int, values: Mapping[str, float]) -> Best | None:
    """The best evaluation by ``checkpoint.best`` so far; of equal ones the first.

    Args:
        best: before this evaluation; one of another metric does not count.
        values: of this evaluation, by the name of the metric.

    Raises:
        RecipeError: the evaluation has no such metric.
    """
    spelled = recipe.checkpoint.best  # with its mode, such as max:accuracy
    metric = recipe.checkpoint.best_metric
    if spelled is None or metric is None or not values:
        return best
    name, greater = metric
    if name not in values:
        known = ", ".join(values)
        raise RecipeError(
            "there is no such metric", where=f"checkpoint.best: {name}", why=f"there are {known}"
        )
    value = values[name]
    if not math.isfinite(value):
        return best
    if best is not None and best.metric == spelled:
        improved = value > best.value if greater else value < best.value
        if not improved:
            return best
    return Best(spelled, step, value)
