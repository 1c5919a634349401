"""Epochs become steps: of records, of packed records, of text; the schedule is checked with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.data.epochs import epoch_sentences, steps_of_epochs, with_steps
from shardwise.data.opening import open_splits, tokenizer_of
from shardwise.recipe.load import dump_recipe, parse_recipe, recipe_of
from shardwise.recipe.sections import Recipe

MODEL = {"preset": "tiny"}


def recipe(folder: Path, records: int = 40, **changes: Any) -> Recipe:
    lines = [json.dumps({"prompt": "what?", "completion": f"number {n}"}) for n in range(records)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    data = {"source": str(folder / "data.jsonl"), "sequence_length": 64, "held_out": 0.1}
    values = {"model": MODEL, "data": data, "batch_size": 8, "epochs": 3, **changes}
    return recipe_of(values)


@pytest.mark.parametrize(
    ("epochs", "sequences", "batch", "steps"),
    [
        (1, 64, 16, 4),
        (3, 10, 4, 8),
        (0.5, 64, 16, 2),
        (0.01, 5, 64, 1),
        (0.7, 100, 10, 7),
        (2.0, 1_000_003, 64, 31251),
    ],
)
def test_steps_are_epochs_of_sequences_rounded_up(
    epochs: float, sequences: int, batch: int, steps: int
) -> None:
    assert steps_of_epochs(epochs, sequences, batch) == steps


@pytest.mark.parametrize("packing", [False, True])
def test_every_training_sequence_is_seen_once_an_epoch(packing: bool, tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    asked = asked.model_copy(update={"data": asked.data.model_copy(update={"packing": packing})})
    splits = open_splits(asked.data, tokenizer_of(asked.data), tmp_path / "cache")
    counted = with_steps(asked)
    assert counted.epochs is None and counted.steps == -(-3 * len(splits.train) // 8)
    assert list(epoch_sentences(asked, counted)) == [f"3 epochs are {counted.steps} steps of 8 sequences"]
    written = parse_recipe(dump_recipe(counted), ())  # the run's own recipe says steps
    assert (written.steps, written.epochs) == (counted.steps, None)


def test_a_recipe_with_steps_is_left_alone(tmp_path: Path) -> None:
    asked = recipe_of({"model": MODEL, "steps": 5, "batch_size": 8, "data": {"source": "no/such/file.jsonl"}})
    assert with_steps(asked) is asked and list(epoch_sentences(asked, asked)) == []


def test_a_schedule_longer_than_the_epochs_is_refused_with_the_data(tmp_path: Path) -> None:
    asked = recipe(tmp_path, schedule={"warmup": 100})
    with pytest.raises(RecipeError, match="the warmup leaves no steps at the peak"):
        with_steps(asked)


def test_epochs_survive_yaml_and_exclude_steps() -> None:
    values = {"model": MODEL, "batch_size": 4}
    asked = recipe_of({**values, "epochs": 1.5})
    text = dump_recipe(asked)
    assert "\nepochs: 1.5\n" in text and "\nsteps:" not in text and parse_recipe(text, ()) == asked
    for wrong, said in (
        ({}, "steps is missing"),
        ({"steps": 3, "epochs": 1}, "the length of the run is given twice"),
        ({"steps": 0}, "steps"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1, "model": {"factory": "a:b"}}, "epochs cannot be set here"),
    ):
        with pytest.raises(RecipeError, match=said):
            recipe_of({**values, **wrong})


def test_an_override_replaces_the_other_length(tmp_path: Path) -> None:
    from shardwise.recipe.load import load_recipe

    path = tmp_path / "r.yaml"
    path.write_text("model: {preset: tiny}\nbatch_size: 4\nepochs: 2\n")
    assert load_recipe(path, ["steps=7"], ()).epochs is None
    path.write_text("model: {preset: tiny}\nbatch_size: 4\nsteps: 7\n")
    assert load_recipe(path, ["epochs=2"], ()).steps == 0


@pytest.mark.parametrize(
    ("objective", "packing", "word"),
    [
        ("dpo", False, "pairs"),
        ("reward", False, "pairs"),
        ("dpo", True, "sequences"),
        ("kto", False, "sequences"),
    ],
)
def test_a_batch_is_in_the_word_of_its_samples(objective: str, packing: bool, word: str) -> None:
    data = {"source": "pairs.jsonl", "packing": packing}
    values = {"model": MODEL, "objective": objective, "data": data, "batch_size": 8}
    asked, counted = recipe_of({**values, "epochs": 2}), recipe_of({**values, "steps": 5})
    assert list(epoch_sentences(asked, counted)) == [f"2 epochs are 5 steps of 8 {word}"]
