"""A small exploration: one model on two devices, with the first groups of its grid."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardwise.plugins.explorer import grid
from shardwise.plugins.explorer.exploration import Exploration
from shardwise.recipe.load import dump_recipe
from tests.report.conftest import write_run

RECIPE = """\
model: {layers: 2, width: 128, heads: 4, kv_heads: 2, ffn: 256, vocab: 32768, context: 256}
data: {source: stdlib, tokenizer: bytes, sequence_length: 128}
steps: 100
batch_size: 8
cluster: {preset: 2xH100-80GB, memory_gib: 1.85, price_per_device_hour: 2.5}
strategy: {precision: bf16}
"""
GROUPS = 40


@pytest.fixture(scope="session")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explored") / "small.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture(scope="session", params=[pytest.param("filled", marks=pytest.mark.long)])
def exploration(recipe_path: Path) -> Exploration:
    """All singles and some pairs of changes, on all devices of the kind. Session-wide: it takes minutes."""
    with pytest.MonkeyPatch.context() as patched:
        explored = Exploration(recipe_path, [], "small")
        patched.setattr(grid, "MAX_PAGE_POINTS", GROUPS * len(explored.devices))
        explored.fill(math.inf, lambda: None)
    return explored


@pytest.fixture(scope="session")
def run_folder(recipe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the recipe with half the micro-batch: its step took 1.79 s."""
    planned = Exploration(recipe_path, ["strategy.micro_batch_size=2"], "small")
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", planned.plan)
    recipe = planned.workloads.recipe.model_copy(update={"strategy": dict(planned.plan.strategy.values)})
    (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    return folder
