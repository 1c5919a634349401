"""What the data tests share: a way to open data as a recipe would, with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.data import Data, open_data
from shardwise.recipe.sections import Recipe

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
