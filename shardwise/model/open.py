"""Opens the model that a recipe names: a native decoder, a Hugging Face model or a user's factory.

Each kind of model is imported only when a recipe asks for it: transformers takes seconds to import, and a factory runs
user code.
"""

from __future__ import annotations

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import GIVEN
from shardwise.model.blueprint import Blueprint
from shardwise.recipe.sections import Recipe


def blueprint_of(recipe: Recipe) -> Blueprint:
    """The blueprint of the recipe's model, with its adapters if the recipe has an ``adapter:`` section.

    Raises:
        RecipeError: the model cannot be found, its context is too short, it does not fit ``model.objective``, it lacks
            the target layers, or it is quantized and all its weights would be trained.
        CheckpointError: a file of the model is damaged.
    """
    base = base_of(recipe)
    if recipe.adapter is None and base.quantized:
        raise RecipeError(
            "quantized weights cannot be trained",
            where=f"model.hf: {recipe.model.hf}",
            why="an update is smaller than the distance between two of their levels",
            fix="train an adapter on them (section adapter:), or give the unquantized model",
        )
    if recipe.adapter is None:
        return base
    from shardwise.model.adapted import AdaptedModel

    return AdaptedModel(base, recipe.adapter)


def base_of(recipe: Recipe) -> Blueprint:
    """The recipe's model without adapters. Raises as ``blueprint_of``."""
    spec, length = recipe.model, recipe.data.sequence_length
    if spec.hf is not None:
        from shardwise.model.hf import HuggingFaceModel

        made = HuggingFaceModel(
            spec.hf, length, spec.objective, recipe.data.decoder_length, dropout=spec.dropout
        )
        made.require_objective()
        return made
    if spec.factory is not None:
        from shardwise.model.factory import FactoryModel
        from shardwise.model.object_model import ObjectModel

        kind = ObjectModel if spec.factory.startswith(f"{GIVEN}:") else FactoryModel
        return kind(spec.factory, spec.arguments)
    from shardwise.model.native import NativeModel

    return NativeModel.from_spec(spec, length)
