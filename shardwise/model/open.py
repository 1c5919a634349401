"""Opens the model that a recipe names: a native decoder, a Hugging Face model or a user's factory.

Each kind of model is imported only when a recipe asks for it: transformers takes seconds to import, and a factory runs
user code.
"""

from __future__ import annotations

from shardwise.core.errors import RecipeError
from shardwise.core.plugins import OBJECTIVES, require_plugin
from shardwise.core.user_objects import GIVEN, resolve
from shardwise.model.blueprint import Blueprint, OwnLoss, TrainingObjective
from shardwise.recipe.sections import Recipe


def blueprint_of(recipe: Recipe) -> Blueprint:
    """The blueprint of the recipe's model, with its adapters if the recipe has an ``adapter:`` section.

    Raises:
        RecipeError: the model cannot be found, its context is too short, it does not fit ``model.objective``, or it
            lacks the target layers; or the objective cannot be made.
        CheckpointError: a file of the model is damaged.
    """
    blueprint = model_of(recipe)
    blueprint.minimises = _training_objective(recipe)
    return blueprint


def model_of(recipe: Recipe) -> Blueprint:
    """As ``blueprint_of``, without the objective, whose code is not imported."""
    blueprint = with_head(base_of(recipe), recipe)
    if recipe.adapter is not None:
        from shardwise.model.adapted import AdaptedModel

        blueprint = AdaptedModel(blueprint, recipe.adapter)
    return blueprint


def _training_objective(recipe: Recipe) -> TrainingObjective:
    """The objective that the recipe names. Raises RecipeError if it cannot be made."""
    spec = recipe.objective
    if spec is None:
        return OwnLoss()
    if spec.factory is None:
        assert spec.name is not None
        plugin = require_plugin(OBJECTIVES[spec.name], f"objective: {spec.name}")
        objective = plugin.objective(recipe)
        assert isinstance(objective, TrainingObjective)
        return objective
    where = f"objective.factory: {spec.factory}"
    function = resolve(spec.factory, "objective.factory")
    try:
        objective = function(recipe, **spec.arguments)
    except TypeError as error:
        raise RecipeError("the objective cannot be made", where=where, why=str(error)) from error
    if not isinstance(objective, TrainingObjective):
        why = f"the function returns {type(objective).__name__}"
        raise RecipeError(
            "the objective cannot be made", where=where, why=why, fix="return a TrainingObjective"
        )
    return objective


def with_head(base: Blueprint, recipe: Recipe) -> Blueprint:
    """The recipe's model with the head that its objective trains: one number per token, or also a value."""
    head = recipe.objective.head if recipe.objective is not None else ""
    if head == "score":
        from shardwise.model.heads import scalar_head

        return scalar_head(base)
    if head == "value":
        from shardwise.model.heads import value_head

        return value_head(base)
    return base


def base_of(recipe: Recipe) -> Blueprint:
    """The recipe's model without adapters and with its own head. Raises as ``blueprint_of``."""
    spec = recipe.model
    length = recipe.data.sequence_length
    if spec.hf is not None:
        from shardwise.model.hf import HuggingFaceModel

        model = HuggingFaceModel(
            spec.hf, length, spec.objective, recipe.data.decoder_length, dropout=spec.dropout
        )
        model.require_objective()
        return model
    if spec.factory is not None:
        from shardwise.model.factory import FactoryModel
        from shardwise.model.object_model import ObjectModel

        kind = ObjectModel if spec.factory.startswith(f"{GIVEN}:") else FactoryModel
        return kind(spec.factory, spec.arguments)
    from shardwise.model.native import NativeModel

    return NativeModel.from_spec(spec, length)
