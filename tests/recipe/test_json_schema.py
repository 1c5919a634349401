"""The JSON Schema of recipes: it accepts the recipes of the repository, and knows every key with its meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import run
from shardwise.recipe.json_schema import recipe_schema
from shardwise.recipe.yaml_source import read_document
from shardwise.technique import SETTINGS

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_every_key_has_a_meaning() -> None:
    schema = recipe_schema(SETTINGS)
    for name, section in {"top": schema, **schema["$defs"]}.items():
        for key, said in section.get("properties", {}).items():
            assert said.get("description"), f"{name}.{key}"
    strategy = schema["properties"]["strategy"]["properties"]
    assert strategy.keys() == {setting.key for setting in SETTINGS}
    assert (
        strategy["zero_stage"]["enum"][:4] == [0, 1, 2, 3]
        and schema["$defs"]["DataSpec"]["additionalProperties"] is False
    )


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_the_repositorys_recipes_are_valid(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(read_document(path).values, recipe_schema(SETTINGS))


def test_a_misspelled_key_is_marked() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    values: dict[str, Any] = {"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1}
    jsonschema.validate(values, recipe_schema(SETTINGS))
    for wrong in (
        {"step": 3},
        {"strategy": {"zero_stage": 4}},
        {"data": {"sorce": "x"}},
        {"trackers": ["wnb"]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | wrong, recipe_schema(SETTINGS))


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Shardwise recipe"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardwise 0.")
