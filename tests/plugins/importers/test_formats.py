"""The tables of keys against the projects that define them, where these are installed."""

from __future__ import annotations

import ast
import importlib.util
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.plugins.importers.formats import FORMAT_NAMES, Mapped, Unmapped, format_named, recognised
from shardwise.recipe.load import SECTIONS
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.plugins.importers.foreign import convert

KEYS = {setting.key for setting in SETTINGS}


def fields_of(package: str, file: str, name: str) -> set[str]:
    """The annotated fields of a class, read from the source without importing the package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(found.origin).parent / file).read_text(encoding="utf-8"))
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        str(each.target.id)
        for each in made.body
        if isinstance(each, ast.AnnAssign)
        if isinstance(each.target, ast.Name)
    }


@pytest.mark.parametrize(
    ("form", "package", "file", "name"),
    [
        ("trainer", "transformers", "training_args.py", "TrainingArguments"),
        ("accelerate", "accelerate", "commands/config/config_args.py", "BaseConfig"),
        ("accelerate", "accelerate", "commands/config/config_args.py", "ClusterConfig"),
        ("accelerate", "accelerate", "commands/config/config_args.py", "SageMakerConfig"),
    ],
)
def test_every_field_of_the_installed_version_has_an_entry(
    form: str, package: str, file: str, name: str
) -> None:
    """A section, such as ``fsdp_config``, may have entries for its keys instead."""
    table = format_named(form)
    tops = {key.split(".")[0] for key in table.entries}
    fields = {field for field in fields_of(package, file, name) if not field.startswith("_")}
    assert fields and sorted(fields - tops) == []


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_places_of_a_table_are_keys_of_a_recipe(name: str) -> None:
    for key, entry in format_named(name).entries.items():
        if isinstance(entry, Unmapped):
            assert entry.why and entry.why == entry.why.strip(), key
            continue
        for place in entry.targets:
            section, _, inner = place.partition(".")
            if place.startswith("@"):
                continue
            known = (
                KEYS
                if section == "strategy"
                else SECTIONS[section].model_fields
                if inner
                else Recipe.model_fields
            )
            assert (inner or place) in known, f"{name}: {key} -> {place}"
        assert bool(entry.to) != bool(entry.values), key


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_fact_of_a_table_is_used(name: str) -> None:
    """A value that nothing combines would be lost without a row."""
    folder = Path(format_named.__wrapped__.__code__.co_filename).parent
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    for key, entry in format_named(name).entries.items():
        for target in entry.targets if isinstance(entry, Mapped) else ():
            fact = target.removeprefix("@").partition(":")[0]
            known = target == f"@{fact}" or target.startswith(f"@{fact}:")
            assert not known or re.search(rf'"{fact}[":]|{fact}:|usual_', code), f"{name}: {key}"


def test_a_child_of_a_section_without_a_place_has_its_reason() -> None:
    table = format_named("deepspeed")
    assert table.entry("aio.queue_depth") is table.entries["aio"]
    assert table.entry("optimizer.params.freeze_step") is table.entries["optimizer.params"]
    assert table.entry("zero_optimization.stage.more") is None  # of a mapped key, nothing is implied
    assert table.entry("nothing") is None


def test_a_recipe_is_of_no_other_kind() -> None:
    assert recognised({"model": {"preset": "tiny"}, "seed": 1, "train_batch_size": 2}) is None
    assert recognised({"some": "text"}) is None
    assert recognised({"checkpoint_dir": "x"}) is None  # LitGPT's files have a section train


BASES: dict[str, dict[str, Any]] = {
    "deepspeed": {"train_micro_batch_size_per_gpu": 2},
    "accelerate": {"distributed_type": "NO"},
    "trainer": {"num_train_epochs": 1},
    "trl": {"packing": True, "use_peft": True},
    "llamafactory": {"stage": "sft", "dataset": "a"},
    "axolotl": {"base_model": "m", "adapter": "lora"},
    "litgpt": {"checkpoint_dir": "c", "train": {}},
    "torchtitan": {"job": {}, "model": {}, "training": {}},
}


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_no_value_of_a_key_is_an_unexpected_failure(name: str, tmp_path: Path) -> None:
    """A value of a kind that the key does not have is a row or one line."""
    for key, entry in format_named(name).entries.items():
        if not isinstance(entry, Mapped):
            continue
        for odd in (True, 0, -1, 7, 0.5, "x", ["a"], {"a": 1}, "auto", float("inf")):
            content = {key: dict(own) if isinstance(own, dict) else own for key, own in BASES[name].items()}
            inner = content
            *sections, last = key.replace("[]", "").split(".")
            for section in sections:
                inner[section] = dict(inner.get(section) or {})
                inner = inner[section]
            inner[last] = odd
            if "[]" in key:
                content[key.partition("[")[0]] = [content[key.partition("[")[0]]]
            with suppress(RecipeError):
                convert(tmp_path, {"a.json": content}, world="8", kind=name).text()
