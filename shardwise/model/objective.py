"""What a run makes small: the loss of the model itself, or an objective that may read further models.

A model has a role. The *trained* one is the recipe's. The others, such as a teacher or a reference, are *frozen*: they
are built, divided over the ranks and filled as the trained one is, in the dtype of compute. They have no gradients, no
optimizer state and no place in checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve

if TYPE_CHECKING:
    from shardwise.model.blueprint import Batch, Blueprint, LossSum
    from shardwise.recipe.sections import Recipe

LossOfBatch: TypeAlias = "Callable[[nn.Module, Batch], LossSum]"
"""The objective as a function of the trained model and a batch."""


class Objective(ABC):
    """What a run makes small. Has no state of its own."""

    def frozen_models(self) -> Mapping[str, Blueprint]:
        """The models that it reads and that are not trained, by role, such as ``reference``."""
        return {}

    def annotated(self, batch: dict[str, Tensor], frozen: Mapping[str, nn.Module]) -> Batch:
        """A micro-batch with what the loss needs of the frozen models. Called without gradients, and on fake tensors."""
        return batch

    @abstractmethod
    def loss(self, blueprint: Blueprint, model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
        """The loss of an annotated micro-batch, summed over its valid targets, and their number."""


class OwnLoss(Objective):
    """The loss that the model's blueprint computes."""

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
        return blueprint.loss(model, batch)


def loss_of(
    blueprint: Blueprint, model: nn.Module, frozen: Mapping[str, nn.Module], batch: dict[str, Tensor]
) -> LossSum:
    """Run the frozen models and the trained one on a micro-batch."""
    objective = blueprint.minimises
    if frozen:
        with torch.no_grad():
            batch = objective.annotated(batch, frozen)
    return objective.loss(blueprint, model, batch)


def objective_of(recipe: Recipe) -> Objective:
    """The objective that the recipe names. Raises RecipeError if it cannot be made."""
    if recipe.objective is None:
        return OwnLoss()
    where = f"objective.factory: {recipe.objective.factory}"
    function = resolve(recipe.objective.factory, "objective.factory")
    try:
        objective = function(recipe, **recipe.objective.arguments)
    except TypeError as error:
        raise RecipeError("the objective cannot be made", where=where, why=str(error)) from error
    if not isinstance(objective, Objective):
        why = f"the function returns {type(objective).__name__}"
        raise RecipeError("the objective cannot be made", where=where, why=why, fix="return an Objective")
    return objective
