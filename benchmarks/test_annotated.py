"""benchmarks/annotated.py: every row is a recipe that this package plans, and errors are predicted over annotated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import annotated
import pytest
from published import lines

from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.technique import refuse_broken, refuse_unsupported

ROWS = list(lines(annotated.ROWS))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['file']} {row['loss']}")
def test_a_row_is_a_recipe_with_the_models_published_size(row: Mapping[str, str], tmp_path: Path) -> None:
    recipe = annotated.recipe_for(row, str(tmp_path))
    cluster = cluster_of(recipe.cluster)
    refuse_broken(recipe, cluster.world_size, str)
    refuse_unsupported(recipe.strategy, cluster.device, str)
    billions = {"3B": 3.09, "7B": 7.62, "14B": 14.77, "72B": 72.7}[row["model"].rpartition("-")[2]]
    assert sum(blueprint_of(recipe).parameter_counts()) / 1e9 == pytest.approx(billions, rel=0.01)
    data = cluster.world_size // int(row["tensor"])
    assert int(row["batch"]) % (int(row["micro_batch"]) * data) == 0


def test_a_table_has_every_row_and_the_medians() -> None:
    rows = [{**ROWS[0], "predicted": {"gib": 22.0, "seconds": 31.0}}]
    rows += [
        {**row, "predicted": {"gib": 1.1 * float(row["annotated_gib"]), "seconds": 1.0}} for row in ROWS[1:3]
    ]
    text = annotated.table(rows)
    assert text.count("\n| `") == 3
    assert "| 44 | 22.0 | -50% | 15.5 | 31.0 | +100% |" in text
    said = (
        "Median error of memory: 10.0% of 3 annotations, 10.0% of the 3 whose software holds the same states"
    )
    assert text.endswith(f"{said}; of seconds: 100% of 1.")
