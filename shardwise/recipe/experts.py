"""The number of experts in a layer of a recipe's model, as far as it is known without loading the model. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.core.errors import RecipeError
from shardwise.recipe.model_section import ModelSpec
from shardwise.recipe.presets import dimensions_of

_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Of a config.json of transformers."""


def experts_of(model: ModelSpec) -> int | None:
    """0 for a dense model; None for a factory's, for one of the hub, and where the dimensions are refused elsewhere."""
    if model.hf is not None:
        try:
            config = json.loads((Path(model.hf) / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config") or config
            return next((int(config[key]) for key in _KEYS if config.get(key)), 0)
        except (OSError, ValueError, TypeError, AttributeError):
            return None
    if model.factory is not None:
        return None
    try:
        return dimensions_of(model).experts
    except RecipeError:
        return None
