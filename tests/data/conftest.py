"""What the data tests share: a way to open data as a recipe would, with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.data import Data, open_data
from shardwise.data.dataset import Splits
from shardwise.data.opening import open_splits
from shardwise.data.tokenizer import open_tokenizer
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import DataSpec, Recipe

Opener = Callable[..., Data]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """`opened(source, dataset, batch_size, seed, sequences, **data)` is the Data of such a recipe."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))

    def open_(
        source: object = "stdlib",
        dataset: Any = None,
        batch_size: int = 4,
        seed: int = 0,
        sequences: int = 32,
        **data: object,
    ) -> Data:
        recipe = Recipe.model_validate(
            {
                "model": {"layers": 1, "width": 8, "heads": 1, "vocab": 256},
                "data": {"source": str(source), "sequence_length": 8, **data},
                "steps": 1,
                "batch_size": batch_size,
                "seed": seed,
                "evaluation": {"sequences": sequences},
            }
        )
        return open_data(recipe, dataset)

    return open_


@pytest.fixture
def opened_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Splits[Any]]:
    """`opened_kind(source, tokenizer, kind, **data)` are the sides of a source of samples of a kind."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))

    def open_(source: Path, tokenizer: str = "bytes", kind: str = "pairs", **data: Any) -> Splits[Any]:
        spec = DataSpec(source=str(source), tokenizer=tokenizer, **data)
        return open_splits(spec, open_tokenizer(tokenizer), tmp_path / "cache", kind=kind)

    return open_


@pytest.fixture
def recipe_of_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """`recipe_of_objective(source, objective, **data)` is a recipe with an objective."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))

    def made(source: Path | None, objective: object = "dpo", **data: Any) -> Recipe:
        sources = {} if source is None else {"source": str(source)}
        fields = {"model": {"preset": "tiny"}, "data": {**sources, **data}, "steps": 9, "batch_size": 4}
        return recipe_of({**fields, "objective": objective})

    return made
