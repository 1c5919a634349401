"""Composed counts are those of a full dry run: memory and time of random strategies, and where composing refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.strategy import Strategy
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import compose, compose_corner
from shardwise.planner.compose_align import NotComposable
from shardwise.planner.compose_corner import Corner, CornerPoint
from shardwise.planner.compose_sum import ROLES, Composed
from shardwise.planner.predict import predict
from shardwise.planner.predictor import Predictor
from shardwise.planner.quick import figures_of_stages, sketch_of_stages
from shardwise.planner.read_ahead import ReadAhead
from shardwise.planner.timing import predicted_step_time
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    SETTINGS,
    broken_rules,
    layout_of,
    micro_batches,
    refuse_unsupported,
    strategy_from,
    without_stages,
)

LENGTH = 512
MODEL = {"layers": 6, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 320, "vocab": 512, "context": LENGTH}
"""Large enough that activations are offloaded, and that a rank has more tokens than a chunked loss has chunks."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "bf16", "fp32", "fp16"),
    "zero_stage": (0, 1, 2, 3),
    "replicate": (1, 1, 2),
    "tensor_parallel": (1, 1, 2),
    "tensor_sequence_parallel": ("none", "none", "gathered", "regathered"),
    "sequence_parallel": (1, 1, 1, 2),
    "sequence_method": ("ulysses", "ring"),
    "activation_checkpointing": ("none", "selective", "full", "every:2", "budget:0.4"),
    "loss": ("logits", "chunked"),
    "offload": ("none", "none", "activations", "optimizer", "optimizer+parameters", "activations+optimizer"),
    "micro_batch_size": (1, 2, 3, 4, 8),
}


def recipe(batch_size: int = 32, **cluster: Any) -> Recipe:
    values = {
        "model": MODEL,
        "data": {"sequence_length": LENGTH},
        "steps": 2,
        "batch_size": batch_size,
        "cluster": cluster or {"preset": "4xA100-80GB"},
    }
    return recipe_of(values, SETTINGS)


def predictor(asked: Recipe) -> Predictor:
    return Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))


def composed(predictor: Predictor, strategy: Strategy) -> Composed:
    layout = layout_of(strategy, predictor.cluster.world_size)
    assert predictor.composer is not None
    return predictor.composer.composed(strategy, micro_batches(strategy, layout, predictor.recipe.batch_size))


def differs(predictor: Predictor, strategy: Strategy) -> tuple[float, float]:
    """By which shares the composed memory and time of a strategy differ from those of its full dry run."""
    found = composed(predictor, strategy)
    full = dry_run(predictor.recipe, predictor.blueprint, strategy, predictor.cluster, history=False)
    layout = layout_of(strategy, predictor.cluster.world_size)
    times = [predicted_step_time(each.cost, layout, predictor.cluster).seconds for each in (found, full)]
    assert found.cost.flops == full.cost.flops
    assert_sketched(predictor, strategy, found, times[0])
    return found.peak.bytes / full.peak.bytes - 1, times[0] / times[1] - 1


def assert_sketched(predictor: Predictor, strategy: Strategy, found: Composed, seconds: float) -> None:
    """A sketch has the figures of the composition that it stands for; a call that two parts take away counts twice."""
    layout = layout_of(strategy, predictor.cluster.world_size)
    assert predictor.sketcher is not None
    sketch = predictor.sketcher.sketch(strategy, micro_batches(strategy, layout, predictor.recipe.batch_size))
    assert sketch.bytes == pytest.approx(found.peak.bytes, rel=1e-6)
    assert sketch.host_bytes == found.host.total
    assert sketch.seconds == pytest.approx(seconds, rel=0.01)


def drawn(seed: int, asked: Recipe) -> Iterator[Strategy]:
    """Random strategies that break no rule."""
    choose, cluster = random.Random(seed), cluster_of(asked.cluster)
    masters = random.Random(seed)
    while True:
        values = {key: choose.choice(values) for key, values in CHOICES.items()}
        without = values["precision"] == "bf16" and masters.random() < 0.3
        strategy = strategy_from({**values, "master_weights": not without})
        if not any(broken_rules(strategy, cluster.world_size, asked)):
            refuse_unsupported(strategy.values, cluster.device, str)
            yield strategy


@pytest.mark.parametrize(
    ("batch_size", "values"),
    [
        (16, {"zero_stage": 3, "activation_checkpointing": "full", "micro_batch_size": 4}),
        (4, {"zero_stage": 3, "activation_checkpointing": "every:2", "offload": "activations"}),
        pytest.param(
            16,
            {"master_weights": False, "zero_stage": 2, "loss": "chunked", "micro_batch_size": 2},
            marks=pytest.mark.long,
        ),
        pytest.param(4, {"zero_stage": 1, "loss": "chunked"}, marks=pytest.mark.long),
        pytest.param(
            32,
            {
                "tensor_parallel": 2,
                "tensor_sequence_parallel": "gathered",
                "micro_batch_size": 2,
                "zero_stage": 2,
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_composed_is_counted(batch_size: int, values: dict[str, Any]) -> None:
    """Depth, micro-batch, recomputation and sharding in one strategy, none of whose own dry runs is made."""
    asked = predictor(recipe(batch_size))
    memory, time = differs(asked, strategy_from({"precision": "bf16", **values}))
    assert abs(memory) < 0.02 and abs(time) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_strategies_are_composed_as_counted(seed: int) -> None:
    """Ten strategies of one recipe for each seed. A ring with offloaded activations is the least exact."""
    cluster = {"device": "cpu", "devices_per_node": 4} if seed % 5 == 4 else {"preset": "4xA100-80GB"}
    asked = predictor(recipe(batch_size=(4, 8, 32, 48)[seed % 4], **cluster))
    strategies = drawn(seed, asked.recipe)
    off: dict[str, tuple[float, float]] = {}
    for _ in range(10):
        strategy = next(strategies)
        try:
            memory, time = differs(asked, strategy)
        except NotComposable:
            continue
        if abs(memory) > 0.02 or abs(time) > 0.02:
            off[str(strategy.differences(strategy_from({})))] = memory, time
    assert not off


def test_strategies_share_their_dry_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three micro-batches of two depths from five shallow dry runs."""
    made: list[int | None] = []
    run = compose_corner.dry_run
    monkeypatch.setattr(
        compose_corner, "dry_run", lambda *a, **how: made.append(how["depth"]) or run(*a, **how)
    )
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    asked = predictor(recipe(batch_size=4))
    for size in (1, 2, 3):
        composed(asked, strategy_from({"zero_stage": 3, "micro_batch_size": size}))
    assert sorted(made) == [4, 4, 4, 5, 5], "origin: two depths, two sizes; stage 3: two depths"
    made.clear()
    composed(asked, strategy_from({"zero_stage": 3, "loss": "chunked", "micro_batch_size": 1}))
    assert made == [4], "a loss is the same in a deeper model"


def test_a_size_whose_calls_are_its_own_is_composed_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence makes one kernel less than two: the size of two is asked for first, then that of one."""
    asked = predictor(recipe(batch_size=16))
    assert asked.composer is not None
    counted = asked.composer.count

    def count(point: compose_corner.CornerPoint) -> compose_corner.Corner:
        found = counted(point)
        return replace(found, calls=found.calls[1:]) if point.size == 1 else found

    monkeypatch.setattr(asked.composer, "count", count)
    strategy = strategy_from({"precision": "bf16"})
    two, one = (asked.composer.composed(strategy.with_values(micro_batch_size=size), 4) for size in (2, 1))
    assert sum(kernel.calls for kernel in one.cost.kernels) < sum(kernel.calls for kernel in two.cost.kernels)


def counted_ahead(
    of: Predictor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[CornerPoint], list[CornerPoint]]:
    """Points that are listed to be counted ahead, and all that are counted."""
    ahead, counted = list[CornerPoint](), list[CornerPoint]()
    assert of.composer is not None
    count = of.composer.count

    class Listed(ReadAhead[CornerPoint, Corner]):
        def __init__(self, run: Callable[[CornerPoint], Corner], tasks: Sequence[CornerPoint]) -> None:
            super().__init__(run, tasks[:1])  # no child
            self._tasks = list(tasks)
            ahead.extend(tasks)

        def get(self, number: int) -> Corner:
            return self._run(self._tasks[number])

    def recorded(point: CornerPoint) -> Corner:
        counted.append(point)
        return count(point)

    monkeypatch.setattr(compose, "ReadAhead", Listed)
    monkeypatch.setattr(of.composer, "count", recorded)
    return ahead, counted


def parts(**others: object) -> list[Strategy]:
    return [
        strategy_from({"zero_stage": stage, "activation_checkpointing": kind, "loss": loss, **others})
        for stage in (0, 1, 3)
        for kind in ("none", "full")
        for loss in ("logits", "chunked")
    ]


@pytest.mark.parametrize("batch_size", [4, 16])
def test_what_is_counted_ahead_is_needed(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned micro-batch gives the number of micro-batches, so no other number is counted."""
    given = {"preset": "4xA100-80GB"}
    asked = recipe(batch_size, **given).model_copy(update={"strategy": {"micro_batch_size": 1}})
    of = predictor(asked)
    ahead, counted = counted_ahead(of, monkeypatch)
    with of.reading_ahead(parts()):
        for strategy in parts():
            composed(of, strategy)
    assert ahead and set(counted) == set(ahead)


def test_what_stages_need_is_counted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages on 4 devices have two micro-batches on each rank where the model without stages has one."""
    asked = recipe(4, preset="4xA100-80GB").model_copy(update={"strategy": {"micro_batch_size": 1}})
    of = predictor(asked)
    ahead, counted = counted_ahead(of, monkeypatch)
    staged = [each for each in parts(pipeline_parallel=2) if not any(broken_rules(each, 4, asked))]
    with of.reading_ahead(staged):
        for strategy in staged:
            figures_of_stages(of, strategy.with_values(micro_batch_size=1))
    assert ahead and set(counted) == set(ahead)
    assert {point.passes for point in counted} == {1, ROLES}


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 0},
        pytest.param({"zero_stage": 3}, marks=pytest.mark.long),
        pytest.param({"zero_stage": 1, "replicate": 2}, marks=pytest.mark.long),
        {"zero_stage": 3, "replicate": 2},
        pytest.param({"zero_stage": 1, "pipeline_parallel": 4}, marks=pytest.mark.long),
        {"zero_stage": 3, "offload": "optimizer+parameters"},
    ],
    ids=str,
)
def test_estimates_of_stages_hold_what_predictions_of_their_ranks_hold(settings: dict[str, Any]) -> None:
    """Embedding and head are small, so that stages have about equal work."""
    values = recipe(64, preset="16xH100-80GB").model_dump(exclude_none=True)
    values["model"] = {**MODEL, "layers": 16, "width": 512, "ffn": 1536, "vocab": 256}
    of = predictor(recipe_of(values, SETTINGS))
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, "pipeline_parallel": 2, **settings})
    estimate = sketch_of_stages(of, strategy)
    own = of.predict(strategy, quick=True)
    assert estimate.bytes == pytest.approx(own.sum_bytes - own.peak.ledger.overhead, rel=0.05)
    assert estimate.seconds == pytest.approx(own.step.seconds, rel=0.25)


def test_without_stages_groups_of_shards_keep_their_size() -> None:
    strategy = strategy_from({"zero_stage": 3, "replicate": 2, "pipeline_parallel": 4})
    whole = without_stages(strategy)
    degrees = [layout_of(each, 64).degree("shard") for each in (strategy, whole)]
    assert degrees == [8, 8] and layout_of(whole, 64).degree("replicate") == 8
    alone = without_stages(strategy_from({"zero_stage": 3, "pipeline_parallel": 4}))
    assert layout_of(alone, 64).degree("shard") == 64


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_random_strategies_are_extrapolated_as_counted(seed: int) -> None:
    """Ten strategies of one recipe for each seed, with and without stages, from models of four and five blocks."""
    values = recipe(16, preset="16xH100-80GB").model_dump(exclude_none=True)
    asked = recipe_of({**values, "model": {**MODEL, "layers": (11, 12, 16, 21)[seed]}}, SETTINGS)
    blueprint, cluster = blueprint_of(asked), cluster_of(asked.cluster)
    strategies, staged = drawn(seed, asked), random.Random(seed)
    for _ in range(10):
        strategy = next(strategies).with_values(pipeline_parallel=staged.choice((1, 1, 2)))
        if any(broken_rules(strategy, 16, asked)):
            continue
        quick, full = (predict(asked, blueprint, strategy, cluster, quick=each) for each in (True, False))
        assert quick.sum_bytes == pytest.approx(full.sum_bytes, rel=0.01), strategy
        assert quick.step.seconds == pytest.approx(full.step.seconds, rel=0.05), strategy
