"""LoftQ from a base that is quantized already."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.core.errors import RecipeError
from shardwise.core.scheme import scheme_of
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import AdapterSpec
from shardwise.technique import SETTINGS
from tests.harness.quantized import write_quantized_folder


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_base_without_its_unquantized_weights_is_refused(quantize: str, tmp_path: Path) -> None:
    write_quantized_folder(tmp_path / "base", scheme_of("w4a16-g16"))
    adapter = {"rank": 2, "init": "loftq", "quantize": "nf4"}
    values = {"model": {"hf": str(tmp_path / "base")}, "data": {"sequence_length": 16}, "steps": 1}
    recipe = recipe_of({**values, "batch_size": 1, "adapter": adapter}, SETTINGS)
    spec = AdapterSpec(**(adapter | {"quantize": quantize}))
    with pytest.raises(RecipeError, match="LoftQ needs the unquantized weights") as caught:
        blueprint_of(recipe.model_copy(update={"adapter": spec}))
    assert caught.value.exit_code == 2 and "adapter.init" in caught.value.line()
