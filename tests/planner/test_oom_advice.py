"""The nearest plan that fits in the memory that a device had at an OOM."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.oom_advice import nearest_in_words
from shardwise.planner.predict import predict
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from

VALUES = {
    "model": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocab": 256, "context": 256},
    "data": {"source": str(Path(__file__)), "sequence_length": 256},
    "steps": 2,
    "batch_size": 4,
    "cluster": {"device": "cpu", "devices_per_node": 2},
}


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.9, "activation_checkpointing="), pytest.param(0.1, "no plan fits in", marks=pytest.mark.long)],
)
def test_one_setting_is_changed_or_the_least_is_named(share: float, expected: str) -> None:
    recipe = recipe_of(VALUES, SETTINGS)
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)
    strategy = strategy_from({"zero_stage": 3, "micro_batch_size": 1})
    whole = predict(recipe, blueprint, strategy, cluster)
    words = nearest_in_words(recipe, blueprint, cluster, strategy, int(share * whole.allocated_bytes))
    assert expected in words, words


@pytest.mark.long
def test_no_advice_lowers_the_load_that_the_data_demand() -> None:
    """With less room for experts' tokens the same step is void, and runs again with as much."""
    mixture = {"experts": 4, "expert_ffn": 256, "balance_loss": 0.0}
    values = VALUES | {"model": {**VALUES["model"], **mixture}}
    recipe = recipe_of(values, SETTINGS)
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)
    small = {"precision": "bf16", "master_weights": False, "activation_checkpointing": "full"}
    strategy = strategy_from({"zero_stage": 3, "micro_batch_size": 1, "expert_parallel": 2, **small})
    words = nearest_in_words(recipe, blueprint, cluster, strategy, 1)
    assert "no plan fits in" in words and "ep2" in words and "capacity" not in words, words
