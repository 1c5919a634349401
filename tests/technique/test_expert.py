"""Expert parallelism trains as one plain process, with every other technique."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS
from tests.harness.corpora import EVEN
from tests.harness.families import save_tiny
from tests.harness.parity import Parity, Trial

pytest.importorskip("transformers")


def recipe_for(folder: Path, family: str = "mixtral", **sections: Any) -> Recipe:
    if not folder.exists():
        save_tiny(family, folder, vocab_size=264)
    values = {
        "model": {"hf": str(folder)},
        "data": {"source": EVEN, "sequence_length": 16},
        "steps": 4,
        "batch_size": 8,
    }
    return recipe_of(values | sections, SETTINGS)


def trial(folder: Path, world: int, **settings: Any) -> Trial:
    fixed = {"precision": "fp64", "expert_parallel": 2, "micro_batch_size": 2}
    sections = {"optimizer": {"clip_norm": None}} if "optimizer_in_backward" in settings else {}
    return Trial(recipe_for(folder, **sections), world, fixed | settings)


def test_trains_as_one_plain_process(parity: Parity, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    parity.all_pass(*[trial(folder, 2, zero_stage=stage) for stage in (0, 1, 2, 3)])


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_parallel": 4, "zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3, "replicate": 2},
        {"zero_stage": 3, "tensor_parallel": 2, "expert_parallel": 4},
        {"zero_stage": 1, "tensor_parallel": 2},
        {"zero_stage": 1, "sequence_parallel": 2},
        {"zero_stage": 2, "sequence_parallel": 2, "expert_parallel": 4},
        {"zero_stage": 1, "pipeline_parallel": 2},
        {"zero_stage": 3, "activation_checkpointing": "full"},
        {"zero_stage": 1, "expert_capacity": 1.0},
        {"zero_stage": 1, "optimizer_in_backward": True},
        {"zero_stage": 2, "offload": "optimizer+parameters"},
    ],
    ids=str,
)
def test_mixes(settings: dict[str, Any], parity: Parity, tmp_path: Path) -> None:
    parity.all_pass(trial(tmp_path / "m", 4, **settings))
