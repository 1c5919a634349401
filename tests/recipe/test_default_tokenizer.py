"""The default of data.tokenizer: that of the model, if the model has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.recipe.load import dump_recipe, parse_recipe, recipe_of

STEPS = {"steps": 1, "batch_size": 1}


def tokenizer(model: dict[str, str], data: dict[str, str] | None = None) -> str:
    return recipe_of({"model": model, **STEPS, **({} if data is None else {"data": data})}).data.tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "spiece.model"])
def test_a_folder_with_a_tokenizer_is_the_default(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert tokenizer({"hf": str(tmp_path)}) == str(tmp_path)
    assert tokenizer({"hf": str(tmp_path)}, {"source": "x"}) == str(tmp_path)
    assert tokenizer({"hf": str(tmp_path)}, {"tokenizer": "bytes"}) == "bytes"


def test_a_model_without_a_tokenizer_reads_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert tokenizer({"hf": str(tmp_path)}) == "bytes"
    assert tokenizer({"hf": str(tmp_path / "config.json")}) == "bytes"
    assert tokenizer({"hf": "./not-there"}) == "bytes"
    assert tokenizer({"preset": "tiny"}) == "bytes"


def test_a_model_of_the_hub_brings_its_own() -> None:
    assert tokenizer({"hf": "org/base"}) == "org/base"


def test_a_resolved_recipe_says_it(tmp_path: Path) -> None:
    """The recipe of a run does not change when the model's folder does."""
    (tmp_path / "tokenizer.json").touch()
    text = dump_recipe(recipe_of({"model": {"hf": str(tmp_path)}, **STEPS}))
    (tmp_path / "tokenizer.json").unlink()
    assert parse_recipe(text, ()).data.tokenizer == str(tmp_path)
    plain = dump_recipe(recipe_of({"model": {"hf": str(tmp_path)}, **STEPS}))
    (tmp_path / "tokenizer.json").touch()
    assert parse_recipe(plain, ()).data.tokenizer == "bytes"
