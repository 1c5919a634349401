"""Every key of a recipe that is a path starts at the folder of its file, then at the current one; an override there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.recipe.load import dump_recipe, load_recipe, parse_recipe, recipe_of
from shardwise.technique import SETTINGS

SMALL = "model: {preset: tiny}\n"
BOTH: dict[str, tuple[str, str]] = {
    "model.hf": ("model: {hf: 'PLACE'}\n", "PLACE"),
    "model.factory": ("model: {factory: 'PLACE:make'}\n", "PLACE:make"),
    "data.source": (SMALL + "data: {source: 'PLACE'}\n", "PLACE"),
    "data.tokenizer": (SMALL + "data: {tokenizer: 'PLACE'}\n", "PLACE"),
    "data.mixture": (SMALL + "data: {mixture: [{source: 'PLACE'}]}\n", "PLACE"),
    "evaluation.sets": (SMALL + "evaluation: {sets: {a: 'PLACE'}}\n", "PLACE"),
    "adapter.start_from": (SMALL + "adapter: {start_from: 'PLACE'}\n", "PLACE"),
    "checkpoint.start_from": (SMALL + "checkpoint: {start_from: 'PLACE'}\n", "PLACE"),
    "optimizer.factory": (SMALL + "optimizer: {factory: 'PLACE:make'}\n", "PLACE:make"),
    "schedule.factory": (SMALL + "schedule: {factory: 'PLACE:make'}\n", "PLACE:make"),
    "callbacks": (SMALL + "callbacks: ['PLACE:make']\n", "PLACE:make"),
    "law": (SMALL + "law: 'PLACE.toml'\n", "PLACE.toml"),
    "strategy.offload": (SMALL + "strategy: {offload: 'activations+nvme:PLACE'}\n", "activations+nvme:PLACE"),
}
OVERRIDES = {
    "data.mixture": "data.mixture=[{source: PLACE}]",
    "evaluation.sets": "evaluation.sets={a: PLACE}",
    "callbacks": "callbacks=['PLACE:make']",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: ``near`` is in it and in ``recipes``, ``far`` only in it; each also a module and a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in (
        tmp_path / "recipes" / "near",
        tmp_path / "near",
        tmp_path / "far",
        tmp_path / "home" / "far",
    ):
        folder.mkdir(parents=True)
        folder.with_suffix(".py").touch()
        folder.with_suffix(".toml").touch()
    return tmp_path


def value_of(recipe: Any, key: str) -> str:
    """The text at a key; the first where it holds several."""
    found = recipe
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) or hasattr(found, "keys") else getattr(found, part)
    if key == "data.mixture":
        return str(found[0].source)
    return (
        str(found[0])
        if isinstance(found, tuple)
        else str(next(iter(found.values())))
        if key.endswith("sets")
        else found
    )


@pytest.mark.parametrize("key", BOTH)
def test_where_a_path_starts(key: str, here: Path) -> None:
    text, form = BOTH[key]
    file = here / "recipes" / "r.yaml"

    def read(place: str, *overrides: str) -> str:
        file.write_text(f"{text.replace('PLACE', place)}steps: 1\nbatch_size: 1\n", encoding="utf-8")
        return value_of(load_recipe(Path("recipes/r.yaml"), overrides, SETTINGS), key)

    def whole(place: Path) -> str:
        return form.replace("PLACE", str(place))

    assert read("near") == whole(here / "recipes" / "near")
    assert read("far") == whole(here / "far")
    assert read("nothing") == form.replace("PLACE", "nothing")
    override = OVERRIDES.get(key, f"{key}={form}")
    assert read("near", override.replace("PLACE", "near")) == whole(here / "near")
    if ":make" not in form:
        assert read("~/far") == whole(here / "home" / "far")
        assert read("near", override.replace("PLACE", "~/far")) == whole(here / "home" / "far")
    resolved = load_recipe(file, [], SETTINGS)
    assert parse_recipe(dump_recipe(resolved), SETTINGS) == resolved


def test_words_are_no_paths(here: Path) -> None:
    """Folders with the names of sources, tokenizers and laws change nothing."""
    for name in ("stdlib", "bytes", "besiroglu"):
        (here / name).mkdir()
    recipe = recipe_of({"model": {"preset": "tiny"}, "steps": 1, "batch_size": 1, "law": "besiroglu"})
    assert (recipe.data.source, recipe.data.tokenizer, recipe.law) == ("stdlib", "bytes", "besiroglu")


def test_the_tokenizer_follows_a_model_next_to_the_recipe(here: Path) -> None:
    (here / "recipes" / "near" / "tokenizer.json").touch()
    (here / "recipes" / "r.yaml").write_text("model: {hf: near}\nsteps: 1\nbatch_size: 1\n", encoding="utf-8")
    recipe = load_recipe(here / "recipes" / "r.yaml", [], SETTINGS)
    assert recipe.data.tokenizer == recipe.model.hf == str(here / "recipes" / "near")


def test_sections_from_python_start_at_the_current_folder(here: Path) -> None:
    values = {"model": {"hf": "far"}, "data": {"source": "~/far"}, "steps": 1, "batch_size": 1}
    recipe = recipe_of(values, SETTINGS)
    assert (recipe.model.hf, recipe.data.source) == (str(here / "far"), str(here / "home" / "far"))
    assert values["model"] == {"hf": "far"}, "the caller's values are not changed"


@pytest.mark.parametrize(
    "key", ["model.hf", "model.factory", "data.source", "data.tokenizer", "optimizer.factory"]
)
def test_a_name_that_no_file_system_takes_is_refused_by_its_key(key: str) -> None:
    """Looking for the file would raise OSError."""
    section, name = key.split(".")
    values = {"model": {"preset": "tiny"}, "steps": 2, "batch_size": 2, "data": {}, "optimizer": {}}
    values[section] = {name: f"a/{'x' * 300}"}  # type: ignore[index]
    with pytest.raises(RecipeError, match=r"it has 4000 bytes"):
        recipe_of(values | {section: {name: "ab/" * 1333 + "c"}}, SETTINGS)
    with pytest.raises(
        RecipeError, match=rf"a name is too long for a file .recipe: {key}.: it has 300 bytes"
    ) as refused:
        recipe_of(values, SETTINGS)
    assert len(str(refused.value)) < 250
