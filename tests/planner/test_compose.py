"""Composed of shallow dry runs, memory and time are those of a dry run of the whole step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import counts, read_ahead
from shardwise.planner.compose import ROLES, Composed
from shardwise.planner.counts import Counts, NotComposable, Point
from shardwise.planner.predictor import Predictor
from shardwise.planner.timing import predicted_step_time
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    SETTINGS,
    broken_rules,
    layout_of,
    refuse_unsupported,
    strategy_from,
    without_stages,
)
from tests.harness.dry_runs import dry_run
from tests.harness.tiers import quick

LONG = pytest.mark.long

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


def composed(of: Predictor, strategy: Strategy) -> Composed:
    assert of.composer is not None
    return of.composer.composed(strategy, of.layout(strategy), of.micro_batches(strategy))


def alone(of: Predictor, strategy: Strategy) -> Composed:
    assert of.composer is not None
    return of.composer.alone(strategy, of.layout(strategy), of.micro_batches(strategy))


def errors(of: Predictor, strategy: Strategy, figures: Composed) -> tuple[float, ...]:
    """By which shares memory, time and host memory differ from those of a dry run of the whole step."""
    whole = dry_run(of.recipe, of.blueprint, strategy, of.cluster, history=False)
    seconds = predicted_step_time(whole.cost, of.layout(strategy), of.cluster).seconds
    pairs = (
        (figures.ledger.total, whole.peak.bytes),
        (figures.time.seconds, seconds),
        (figures.host.total, whole.host.total),
    )
    assert figures.disk_bytes == whole.disk_bytes and figures.communicators == whole.communicators
    return tuple(abs(mine / its - 1) if its else float(mine) for mine, its in pairs)


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
            48,
            {"zero_stage": 0, "activation_checkpointing": "none", "loss": "chunked", "micro_batch_size": 3},
            marks=LONG,
        ),
        pytest.param(
            16,
            {"master_weights": False, "zero_stage": 2, "loss": "chunked", "micro_batch_size": 2},
            marks=LONG,
        ),
        pytest.param(4, {"zero_stage": 1, "loss": "chunked"}, marks=LONG),
        pytest.param(
            32,
            {
                "tensor_parallel": 2,
                "tensor_sequence_parallel": "gathered",
                "micro_batch_size": 2,
                "zero_stage": 2,
            },
            marks=LONG,
        ),
    ],
)
def test_composed_is_counted(batch_size: int, values: dict[str, Any]) -> None:
    """Depth, micro-batch, recomputation and sharding in one strategy; from its own shallow dry runs, and from none."""
    of = predictor(recipe(batch_size))
    strategy = strategy_from({"precision": "bf16", **values})
    for figures in (composed(of, strategy), alone(of, strategy)):
        assert max(errors(of, strategy, figures)) < 0.02


@LONG
@pytest.mark.parametrize("seed", range(20))
def test_random_strategies_are_composed_as_counted(seed: int) -> None:
    """Ten strategies of one recipe for each seed. A ring with offloaded activations is the least exact."""
    cluster = {"device": "cpu", "devices_per_node": 4} if seed % 5 == 4 else {"preset": "4xA100-80GB"}
    of = predictor(recipe(batch_size=(4, 8, 32, 48)[seed % 4], **cluster))
    strategies = drawn(seed, of.recipe)
    off: dict[str, tuple[float, ...]] = {}
    for _ in range(10):
        strategy = next(strategies)
        for make in (composed, alone):
            try:
                found = errors(of, strategy, make(of, strategy))
            except NotComposable:
                continue
            if max(found[:2]) > 0.02:
                off[f"{make.__name__} {strategy.differences(strategy_from({}))}"] = found
    assert not off


@pytest.mark.parametrize(
    ("layers", "make", "kind"),
    [
        (11, composed, "none"),
        pytest.param(12, alone, "full", marks=LONG),
        *(pytest.param(layers, composed, "full", marks=LONG) for layers in (11, 12, 13)),
        *(pytest.param(layers, alone, "none", marks=LONG) for layers in (11, 12, 13)),
    ],
)
def test_blocks_of_several_kinds_are_composed(layers: int, make: Any, kind: str, tmp_path: Path) -> None:
    """Two blocks of a sliding window, then one of full attention, and so on; the last period may lack some."""
    transformers = pytest.importorskip("transformers")
    kinds = ["full_attention" if number % 3 == 2 else "sliding_attention" for number in range(layers)]
    size = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.Gemma3TextConfig(
        **size,
        head_dim=16,
        vocab_size=256,
        num_hidden_layers=layers,
        layer_types=kinds,
        sliding_window=32,
        max_position_embeddings=LENGTH,
        architectures=["Gemma3ForCausalLM"],
    ).save_pretrained(tmp_path)
    values = {"model": {"hf": str(tmp_path)}, "data": {"sequence_length": 128}, "steps": 2, "batch_size": 4}
    of = predictor(recipe_of({**values, "cluster": {"preset": "2xA100-80GB"}}, SETTINGS))
    assert of.blueprint.depth is None and of.blueprint.repetition == (layers, 3, 0)
    values = {"zero_stage": 3, "activation_checkpointing": kind, "micro_batch_size": 2}
    strategy = strategy_from({"precision": "bf16", **values})
    assert max(errors(of, strategy, make(of, strategy))) < 0.02
    assert of.composer is not None
    assert all((layers - point.depth) % 3 == 0 < layers - point.depth for point in of.composer.points)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "values"),
    [
        pytest.param(
            composed,
            {"expert_parallel": 2, "zero_stage": 3, "activation_checkpointing": "full"},
            marks=LONG,
        ),
        (alone, {"expert_parallel": 4, "zero_stage": 1}),
        pytest.param(alone, {"zero_stage": 3, "tensor_parallel": 2}, marks=LONG),
    ],
)
def test_dense_blocks_before_a_mixtures_are_counted_once(make: Any, values: dict[str, Any]) -> None:
    """DeepSeek-V3's blocks, with latent attention; shallower models have all of the first ones."""
    asked = recipe(batch_size=16)
    changes = {
        "layers": 13, "kv_heads": 4, "head_dim": 48, "rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 64,
        "experts": 8, "expert_ffn": 64, "shared_ffn": 64, "dense_layers": 3, "router": "sigmoid", "router_bias": True,
    }  # fmt: skip
    of = predictor(asked.model_copy(update={"model": asked.model.model_copy(update=changes)}))
    assert of.blueprint.repetition == (13, 1, 3)
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, **values})
    assert max(errors(of, strategy, make(of, strategy))) < 0.02
    assert of.composer is not None
    assert all(7 <= point.depth <= 8 for point in of.composer.points)


def test_strategies_share_their_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three micro-batches of two depths from five shallow dry runs."""
    made: list[int | None] = []
    run = counts.dry_run
    monkeypatch.setattr(counts, "dry_run", lambda *a, **how: made.append(how["depth"]) or run(*a, **how))
    of = predictor(recipe(batch_size=4))
    for size in (1, 2, 3):
        composed(of, strategy_from({"zero_stage": 3, "micro_batch_size": size}))
    assert sorted(made) == [4, 4, 4, 5, 5], "origin: two depths, two sizes; stage 3: two depths"
    made.clear()
    composed(of, strategy_from({"zero_stage": 3, "loss": "chunked", "micro_batch_size": 1}))
    assert made == [4], "a loss is the same in a deeper model"


def test_a_size_whose_calls_are_its_own_is_no_start_of_a_line() -> None:
    """One sequence makes one kernel less than two: larger sizes are composed from two and four."""
    of = predictor(recipe(batch_size=32))
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 8})
    expected = composed(of, strategy)
    of = predictor(recipe(batch_size=32))
    assert of.composer is not None
    counted = of.composer.count

    def count(point: Point) -> Counts:
        found = counted(point)
        return replace(found, calls=found.calls[1:]) if point.size == 1 else found

    of.composer.count = count
    figures = composed(of, strategy)
    assert figures.ledger.total == pytest.approx(expected.ledger.total, rel=1e-5)
    assert figures.time.seconds == pytest.approx(expected.time.seconds, rel=1e-5)
    sizes = {point.size for point in of.composer.points}
    assert sizes == {1, 2, 4}
    composed(of, strategy.with_values(micro_batch_size=1))
    assert {point.size for point in of.composer.points} == sizes


def parts(**others: object) -> list[Strategy]:
    return [
        strategy_from({"zero_stage": stage, "activation_checkpointing": kind, "loss": loss, **others})
        for stage in (0, 1, 3)
        for kind in ("none", "full")
        for loss in ("logits", "chunked")
    ]


@pytest.mark.parametrize(("batch_size", "stages"), quick([(4, 1), (16, 1), (4, 2)], (4, 1), (4, 2)))
def test_what_is_counted_ahead_is_needed(
    batch_size: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned micro-batch gives the number of micro-batches, so no other number is counted.

    Two stages on 4 devices have two micro-batches on each rank where the model without stages has one.
    """
    monkeypatch.setattr(read_ahead, "usable_cores", lambda: 1)
    asked = recipe(batch_size, preset="4xA100-80GB").model_copy(update={"strategy": {"micro_batch_size": 1}})
    ahead, later = predictor(asked), predictor(asked)
    strategies = [each for each in parts(pipeline_parallel=stages) if not any(broken_rules(each, 4, asked))]
    ahead.count_ahead(strategies)
    for strategy in strategies:
        later.stage_estimate(strategy) if stages > 1 else later.estimate(strategy)
    assert ahead.composer is not None and later.composer is not None
    assert set(ahead.composer.points) == set(later.composer.points)
    assert {point.passes for point in later.composer.points} == (
        {1} if batch_size == 4 == 4 * stages else {1, ROLES}
    )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"zero_stage": 0}, marks=LONG),
        pytest.param({"zero_stage": 3}, marks=LONG),
        pytest.param({"zero_stage": 1, "replicate": 2}, marks=LONG),
        {"zero_stage": 3, "replicate": 2},
        pytest.param({"zero_stage": 1, "pipeline_parallel": 4}, marks=LONG),
        pytest.param({"zero_stage": 3, "offload": "optimizer+parameters"}, marks=LONG),
    ],
    ids=str,
)
def test_estimates_of_stages_are_near_the_dry_runs_of_their_ranks(settings: dict[str, Any]) -> None:
    """Embedding and head are small, so that stages have about equal work."""
    values = recipe(64, preset="16xH100-80GB").model_dump(exclude_none=True)
    values["model"] = {**MODEL, "layers": 8, "width": 512, "ffn": 1536, "vocab": 256}
    of = predictor(recipe_of(values, SETTINGS))
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, "pipeline_parallel": 2, **settings})
    estimate, own = of.stage_estimate(strategy), of.estimate(strategy)
    assert estimate.tensors == pytest.approx(own.tensors, rel=0.05)
    assert estimate.seconds == pytest.approx(own.seconds, rel=0.25)
    assert estimate.host_bytes == pytest.approx(own.host_bytes, rel=0.05)


def test_without_stages_groups_of_shards_keep_their_size() -> None:
    strategy = strategy_from({"zero_stage": 3, "replicate": 2, "pipeline_parallel": 4})
    whole = without_stages(strategy)
    degrees = [layout_of(each, 64).degree("shard") for each in (strategy, whole)]
    assert degrees == [8, 8] and layout_of(whole, 64).degree("replicate") == 8
    alone = without_stages(strategy_from({"zero_stage": 3, "pipeline_parallel": 4}))
    assert layout_of(alone, 64).degree("shard") == 64


@LONG
@pytest.mark.parametrize("seed", range(4))
def test_random_strategies_of_deep_models_are_estimated_as_counted(seed: int) -> None:
    """Ten strategies of one recipe for each seed, with and without stages."""
    values = recipe(16, preset="16xH100-80GB").model_dump(exclude_none=True)
    of = predictor(recipe_of({**values, "model": {**MODEL, "layers": (11, 12, 16, 21)[seed]}}, SETTINGS))
    strategies, staged = drawn(seed, of.recipe), random.Random(seed)
    for _ in range(10):
        strategy = next(strategies).with_values(pipeline_parallel=staged.choice((1, 1, 2)))
        if any(broken_rules(strategy, 16, of.recipe)):
            continue
        estimate, whole = of.estimate(strategy, alone=True), of.confirm(strategy)
        assert estimate.bytes == pytest.approx(whole.sum_bytes, rel=0.01), strategy
        assert estimate.seconds == pytest.approx(whole.step.seconds, rel=0.05), strategy
