"""The bound that discards strategies is below what they hold, and near it."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.dryrun.run import DryRun
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import lower_bound
from shardwise.planner.lower_bound import _bytes_per_parameter, least_state_bytes
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, layout_of, strategy_from
from tests.harness.dry_runs import dry_run
from tests.harness.tiers import quick

MODEL = {"layers": 3, "width": 256, "heads": 4, "kv_heads": 2, "ffn": 768, "vocab": 512}


def most_of_states(run: DryRun) -> int:
    """Before the update: all weights, gradients and optimizer state, and none gathered."""
    ledger = run.peaks["clip"].ledger
    return ledger.parameters + ledger.master_weights + ledger.gradients + ledger.optimizer_state


@pytest.mark.parametrize("stage", quick([0, 3], 3))
@pytest.mark.parametrize(
    ("settings", "optimizer", "bytes_per_parameter"),
    [
        ({}, "adamw", 16),
        ({"precision": "bf16"}, "adamw", 16),
        ({"precision": "bf16", "master_weights": False}, "adamw", 12),
        ({"precision": "bf16", "master_weights": False}, "adamw_8bit", 6.06),
        ({}, "sgd", 12),
    ],
)
def test_bound_is_below_what_is_held_and_near_it(
    stage: int, settings: dict[str, Any], optimizer: str, bytes_per_parameter: float
) -> None:
    values = {
        "model": MODEL,
        "data": {"sequence_length": 8},
        "steps": 1,
        "batch_size": 4,
        "optimizer": {"name": optimizer},
        "cluster": {"device": "cpu", "devices_per_node": 4},
    }
    recipe, strategy = recipe_of(values, SETTINGS), strategy_from({**settings, "zero_stage": stage})
    run = dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster))
    layout = layout_of(strategy, 4)
    counts = blueprint_of(recipe).parameter_counts()
    least = least_state_bytes(counts, strategy, layout, recipe, cluster_of(recipe.cluster))
    assert 0.9 * most_of_states(run) <= least <= most_of_states(run)
    assert least * layout.degree("shard") / run.parameters == pytest.approx(bytes_per_parameter, rel=0.04)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bound_counts_gathered_weights_and_is_below_the_peak(stage: int) -> None:
    """Stages 1 and 2 keep the cast weights of the whole model: 2 bytes of each; 12 more are divided."""
    values = {"model": MODEL, "data": {"sequence_length": 8}, "steps": 1, "batch_size": 4}
    recipe = recipe_of({**values, "cluster": {"device": "cpu", "devices_per_node": 4}}, SETTINGS)
    strategy = strategy_from({"precision": "bf16", "zero_stage": stage})
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)
    counts = blueprint.parameter_counts()
    least = least_state_bytes(counts, strategy, layout_of(strategy, 4), recipe, cluster)
    run = dry_run(recipe, blueprint, strategy, cluster)
    assert least <= run.peak.bytes
    if stage in (1, 2):
        assert least >= 0.9 * sum(counts) * (2 + 12 / 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1},
        {"zero_stage": 3, "replicate": 4},
        *(
            pytest.param(settings, marks=pytest.mark.long)
            for settings in (
                {"zero_stage": 3},
                {"zero_stage": 1, "offload": "optimizer"},
                {"zero_stage": 1, "offload": "optimizer+parameters"},
                {"zero_stage": 2, "master_weights": False},
            )
        ),
    ],
)
def test_bound_on_many_ranks_is_below_the_peak(settings: dict[str, Any]) -> None:
    """Counted on at most 8 ranks, for 64: the weights alone, without the activations of the dry run's one step."""
    values = {
        "model": MODEL | {"layers": 30},
        "data": {"sequence_length": 8},
        "steps": 1,
        "batch_size": 64,
        "cluster": {"preset": "64xH100-80GB"},
    }
    recipe, strategy = recipe_of(values, SETTINGS), strategy_from({"precision": "bf16", **settings})
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)
    least = least_state_bytes(
        blueprint.parameter_counts(), strategy, layout_of(strategy, 64), recipe, cluster
    )
    rows = ("parameters", "master_weights", "gradients", "optimizer_state")
    timeline = dry_run(recipe, blueprint, strategy, cluster).timeline
    assert least <= max(sum(getattr(point.ledger, row) for row in rows) for point in timeline)


@pytest.mark.parametrize(
    ("quantize", "bytes_per_weight"), quick([("none", 2), ("int8", 1), ("nf4", 0.516)], ("nf4", 0.516))
)
def test_bound_of_frozen_weights(quantize: str, bytes_per_weight: float) -> None:
    """Frozen weights are stored in the compute dtype, quantized in blocks, and have no optimizer state."""
    values = {
        "model": MODEL | {"layers": 4},
        "data": {"sequence_length": 8},
        "steps": 1,
        "batch_size": 1,
        "adapter": {"rank": 2, "quantize": quantize},
    }
    recipe, strategy = recipe_of(values, SETTINGS), strategy_from({"precision": "bf16"})
    blueprint, cluster = blueprint_of(recipe), cluster_of(recipe.cluster)
    run, counts = dry_run(recipe, blueprint, strategy, cluster), blueprint.parameter_counts()
    least = least_state_bytes(counts, strategy, layout_of(strategy, 1), recipe, cluster)
    held = min(s.ledger.parameters + s.ledger.master_weights + s.ledger.optimizer_state for s in run.timeline)
    assert sum(counts) == run.parameters
    assert 0.85 * held <= least <= held
    outside = blueprint.parameter_counts(depth=0)[1]
    frozen = 2 * outside + bytes_per_weight * (counts[1] - outside)
    assert held - 12 * counts[0] == pytest.approx(frozen, rel=0.04)


def test_compiled_blocks_hold_as_much_and_the_bound_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ran = recipe_of({"model": MODEL, "steps": 1, "batch_size": 1}, SETTINGS), []

    def recorded(*arguments: Any) -> DryRun:
        ran.append(arguments[2].values["compile"])
        return run(*arguments)

    run = lower_bound.dry_run

    def least(compile_: str) -> int:
        _bytes_per_parameter.cache_clear()
        strategy = strategy_from({"compile": compile_})
        return least_state_bytes(
            (1000, 0), strategy, layout_of(strategy, 1), asked, cluster_of(asked.cluster)
        )

    monkeypatch.setattr(lower_bound, "dry_run", recorded)
    assert least("block") == least("none") > 0 and set(ran) == {"none"}
