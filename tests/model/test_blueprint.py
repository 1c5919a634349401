"""From a recipe to a blueprint, importing no more than it needs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from shardwise.core.errors import RecipeError
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.language_loss import token_loss, valid_targets


def _recipe(**model: Any) -> Recipe:
    return Recipe(model=model, steps=1, batch_size=1)  # type: ignore[arg-type]


def test_native() -> None:
    blueprint = blueprint_of(_recipe(preset="tiny", layers=3))
    assert blueprint.name == "tiny"
    assert blueprint.depth == 3
    assert blueprint.vocab == 256
    assert blueprint.dataset is None


def test_wrong_models_are_recipe_errors() -> None:
    for model in ({"hf": "./nowhere"}, {"factory": "nowhere:at_all"}, {"preset": "nothing"}, {"layers": 2}):
        with pytest.raises(RecipeError):
            blueprint_of(_recipe(**model))


def test_valid_targets_of_any_shape() -> None:
    labels = torch.tensor([[1, -100, 0], [-100, -100, 2]])
    assert valid_targets(labels).item() == 3
    assert valid_targets(torch.tensor(-100)).item() == 0


def test_token_loss_of_a_sure_answer_is_zero() -> None:
    logits = torch.full((2, 3, 5), -1e9)
    labels = torch.tensor([[0, 1, 2], [3, 4, -100]])
    logits.scatter_(2, labels.clamp(min=0).unsqueeze(2), 0.0)
    total, count = token_loss(logits, labels)
    assert total.item() == 0
    assert count.item() == 5


def test_transformers_is_not_imported_for_native_models() -> None:
    code = (
        "import sys\n"
        "from shardwise.recipe.sections import Recipe\n"
        "from shardwise.model.open import blueprint_of\n"
        "blueprint_of(Recipe(model={'preset': 'tiny'}, steps=1, batch_size=1)).parameter_count()\n"
        "sys.exit('transformers' in sys.modules or 'huggingface_hub' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
