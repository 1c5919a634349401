"""The space that techniques declare, and the choice in it: the fastest that fits, or the smallest where asked for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.core.strategy import Strategy
from shardwise.dryrun.run import DryRun
from shardwise.hardware.cluster import cluster_of
from shardwise.hardware.kinds import DEVICE_KINDS
from shardwise.model.open import blueprint_of
from shardwise.planner import predict
from shardwise.planner.choose import choose_strategy
from shardwise.planner.fragmentation import LearnedFragmentation
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.space import Space
from shardwise.planner.strategy_search import TELLS, StrategySearch
from shardwise.planner.verdicts import Estimate
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, layout_of, strategy_from

MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 256, "context": 64}


def recipe(
    preset: str = "4xA100-80GB", nodes: int = 1, memory_mib: float | None = None, **more: Any
) -> Recipe:
    cluster: dict[str, Any] = {"preset": preset, "nodes": nodes}
    if memory_mib is not None:
        cluster["memory_gib"] = memory_mib / 1024 / (1 - DEVICE_KINDS["cuda"].reserve)
    values = {
        "model": MODEL,
        "data": {"sequence_length": 64},
        "steps": 2,
        "batch_size": 64,
        "cluster": cluster,
        **more,
    }
    return recipe_of(values, SETTINGS)


def space(asked: Recipe, last_resort: bool = False) -> Space:
    return Space(asked, cluster_of(asked.cluster), last_resort)


def every(of: Space) -> list[Strategy]:
    return [each for origins in of.meshes().values() for origin in origins for each in of.completions(origin)]


def fits(of: Predictor, prediction: Prediction) -> bool:
    return of.fits(of.estimate(prediction.strategy))


def test_every_axis_and_every_part_is_in_the_space() -> None:
    found = every(space(recipe(strategy={"precision": "bf16"})))
    varied = {key for each in found for key in each.differences(found[0])}
    assert varied >= {
        *(
            "zero_stage",
            "tensor_parallel",
            "tensor_sequence_parallel",
            "sequence_parallel",
            "sequence_method",
        ),
        *("pipeline_parallel", "activation_checkpointing", "loss"),
    }
    assert len(found) == len(set(found)), "none twice"
    lines = {tuple(layout_of(each, 4).degrees.values()) for each in found}
    assert all(max(degrees) <= 4 for degrees in lines) and len(lines) > 8


def test_tensor_ranks_and_shards_of_copies_stay_within_a_node() -> None:
    found = every(space(recipe("4xA100-80GB", nodes=4, strategy={"precision": "bf16"})))
    assert {each.values["tensor_parallel"] for each in found} == {1, 2}, "of 2 key/value heads"
    hybrid = [layout_of(each, 16) for each in found if each.values["replicate"] != 1]
    assert hybrid and {
        each.degree("shard") * each.degree("tensor") * each.degree("sequence") for each in hybrid
    } <= {4}


def test_what_changes_the_mathematics_needs_leave() -> None:
    """8-bit products and stale weights; what a recipe pins stays."""
    clips = {"clip_norm": None, "adaptive_clip": None}
    asked = {"optimizer": clips, "guard": {"rewinds": 0}}
    plain = every(space(recipe("4xH100-80GB", **asked)))
    assert {each.values["precision"] for each in plain} == {"fp32"}
    assert "pipedream" not in {each.values["pipeline_schedule"] for each in plain}
    free = every(space(recipe("4xH100-80GB", **asked, plan={"allow": ["fp8", "pipedream"]})))
    assert {each.values["precision"] for each in free} == {"fp32", "fp8"}
    assert "pipedream" in {each.values["pipeline_schedule"] for each in free}
    pinned = recipe("4xH100-80GB", plan={"allow": ["fp8"]}, strategy={"precision": "bf16"})
    assert {each.values["precision"] for each in every(space(pinned))} == {"bf16"}


WIDE = {"layers": 6, "width": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "vocab": 256, "context": 64}


def on_one_card(memory_mib: float) -> Predictor:
    """For a model whose gradients take 385 MiB; they are summed over four micro-batches."""
    pinned = {
        "precision": "bf16",
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        "loss": "logits",
    }
    asked = recipe("1xRTX4090-24GB", memory_mib=memory_mib, batch_size=4, model=WIDE, strategy=pinned)
    return Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))


@pytest.mark.long
@pytest.mark.parametrize("memory_mib", [900, 300])
def test_the_gradients_of_one_card_can_leave_it(memory_mib: float) -> None:
    """With offloaded parameters ZeRO 3 of one rank sends gradients to the host, too. Without that it takes 1.2 GiB."""
    predictor = on_one_card(memory_mib)
    chosen = choose_strategy(predictor)
    assert chosen.strategy.values["zero_stage"] == 3
    assert chosen.strategy.values["offload"].endswith("optimizer+parameters")
    assert fits(predictor, chosen) == (memory_mib == 900)
    assert chosen.peak.bytes < 900 << 20, "where nothing fits, the strategy that needs least is named"


@pytest.mark.parametrize(("precision", "stages"), [("fp32", [0]), ("bf16", [1, 0])])
def test_one_card_has_stages_only_where_weights_are_cast(precision: str, stages: list[int]) -> None:
    found = every(space(recipe("1xRTX4090-24GB", strategy={"precision": precision})))
    assert list(dict.fromkeys(each.values["zero_stage"] for each in found)) == stages


def test_one_card_has_later_stages_only_of_offloaded_parameters() -> None:
    asked = recipe("1xRTX4090-24GB", strategy={"precision": "bf16"})
    stages: dict[bool, set[object]] = {True: set(), False: set()}
    for strategy in every(space(asked, last_resort=True)):
        stages["parameters" in strategy.values["offload"]].add(strategy.values["zero_stage"])
    assert stages == {True: {0, 1, 2, 3}, False: {0, 1}}


def in_device_memory(predictor: Predictor) -> Prediction:
    """The best strategy without values of the last resort that fits, and is not tight."""
    search = StrategySearch(predictor, space(predictor.recipe))
    return next(full for full in search.confirmed() if full.retries == 0)


@pytest.mark.long
@pytest.mark.parametrize(("memory_mib", "stage"), [(4096, 1), (2700, 0)])
def test_one_card_keeps_cast_weights_if_they_fit(memory_mib: float, stage: int) -> None:
    """They take 193 MiB, and the step needs 2,628 MiB without them."""
    assert in_device_memory(on_one_card(memory_mib)).strategy.values["zero_stage"] == stage


def test_offloading_is_the_last_resort() -> None:
    asked = recipe(strategy={"precision": "bf16"})
    assert {each.values["offload"] for each in every(space(asked))} == {"none"}
    assert len({each.values["offload"] for each in every(space(asked, last_resort=True))}) > 3


def narrow(memory_mib: float) -> Predictor:
    """Of a card on which 2,700 MiB suffice without offloading if all blocks are recomputed, for 26 % more time."""
    pinned = {"precision": "bf16", "compile": "none", "loss": "logits", "master_weights": True}
    asked = recipe(
        "1xRTX4090-24GB",
        memory_mib=memory_mib,
        batch_size=256,
        model=WIDE | {"context": 1024},
        data={"sequence_length": 1024},
        strategy=pinned,
    )
    return Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))


@pytest.mark.long
@pytest.mark.parametrize(("memory_mib", "offload"), [(2700, "optimizer+parameters"), (3500, "none")])
def test_states_are_offloaded_where_that_saves_much(memory_mib: float, offload: str) -> None:
    predictor = narrow(memory_mib)
    chosen = choose_strategy(predictor)
    assert chosen.strategy.values["offload"] == offload and fits(predictor, chosen)
    plain = in_device_memory(predictor)
    assert (chosen.step.seconds < 0.9 * plain.step.seconds) == (offload != "none")


@pytest.mark.long
def test_offloading_is_tried_after_the_first_tight_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy faster than that one is faster than all that the search would look at next."""

    def retries(prediction: Prediction) -> int:
        return int(prediction.strategy.values["offload"] == "none")

    monkeypatch.setattr(Prediction, "retries", property(retries))
    predictor = narrow(2700)
    assert choose_strategy(predictor).strategy.values["offload"] == "optimizer+parameters"
    tight = [full.retries > 0 for strategy, full in predictor._predictions.items() if fits(predictor, full)]
    assert tight[-1] is False and all(tight[:-1]) and len(tight) <= 3


def test_plainer_compares_ordered_settings_alone() -> None:
    """Recomputation takes time; stages of ZeRO are not ordered by time."""
    of, plain = space(recipe()), strategy_from({})
    full, sharded = (
        plain.with_values(**v) for v in ({"activation_checkpointing": "full"}, {"zero_stage": 1})
    )
    assert of.plainer(plain, plain) and of.plainer(plain, full) and not of.plainer(full, plain)
    assert not of.plainer(plain, sharded) and not of.plainer(sharded, plain)


def test_children_have_one_larger_degree() -> None:
    """Degrees of pipeline, experts, sequence and tensor."""
    of = space(recipe())
    meshes = dict.fromkeys([(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 2, 2), (3, 1, 1, 1)])
    assert list(of.children((1, 1, 1, 1), meshes)) == [(3, 1, 1, 1), (1, 1, 2, 1)]
    assert list(of.children((1, 1, 2, 1), meshes)) == [(1, 1, 4, 1), (1, 1, 2, 2)]


def test_experts_are_divided_over_a_node_first() -> None:
    """Then over more nodes, and over fewer devices: 2 ranks of 8 move about as many bytes between nodes as one."""
    of = space(recipe("4xA100-80GB", nodes=4))
    meshes = {(1, degree, 1, 1): None for degree in (1, 2, 4, 8, 16)}
    assert list(of.children((1, 1, 1, 1), meshes)) == [(1, 4, 1, 1)]
    assert list(of.children((1, 4, 1, 1), meshes)) == [(1, 8, 1, 1), (1, 2, 1, 1)]
    assert list(of.children((1, 8, 1, 1), meshes)) == [(1, 16, 1, 1)]


@pytest.mark.parametrize("degree", [1, 2])
def test_where_experts_are_divided_a_trial_first_recomputes_nothing(degree: int) -> None:
    """Recomputation repeats the exchange of tokens, and the memory that divided experts free may do without it."""
    pinned = {**ALONE, "zero_stage": 3, "expert_parallel": degree}
    asked = recipe(model={**MODEL, "experts": 4}, strategy=pinned)
    of = StrategySearch(Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster)), space(asked))
    (origin,) = next(iter(of.meshes.values()))
    completions = list(of.space.completions(origin))
    full = next(s for s in completions if s.values["activation_checkpointing"] == "full")
    of.fitting = [SimpleNamespace(strategy=full, seconds=1.0)]  # type: ignore[list-item]
    first, *others = [s.values["activation_checkpointing"] for s in of._few(origin, completions)]
    assert first == ("full" if degree == 1 else "none")
    assert "full" in [first, *others]


ALONE = {"tensor_parallel": 1, "sequence_parallel": 1, "pipeline_parallel": 1, "precision": "bf16"}


def search(
    memory_mib: float | None = None, objective: str = "seconds", devices: int = 2, **pinned: object
) -> StrategySearch:
    """On a few devices, without model axes, which take seconds; of a model that estimates are composed for."""
    strategy = {**ALONE, "loss": "logits", "replicate": 1, "compile": "none", **pinned}
    values: dict[str, Any] = {"model": {**WIDE, "layers": 5}, "strategy": strategy, "batch_size": 2 * devices}
    asked = recipe(f"{devices}xA100-80GB", memory_mib=memory_mib, plan={"objective": objective}, **values)
    return StrategySearch(Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster)), space(asked))


def confirmed(of: StrategySearch) -> list[Prediction]:
    """Every completion with every micro-batch, dry-run in full."""
    return [
        of.predictor.confirm(strategy.with_values(micro_batch_size=size))
        for strategy in every(of.space)
        for size in of.predictor.micro_batch_sizes(strategy)
    ]


def assert_nothing_is_better(of: StrategySearch) -> None:
    predictor, by_memory = of.predictor, of.predictor.by_memory
    chosen = choose_strategy(predictor)
    fitting = [full for full in confirmed(of) if fits(predictor, full) and not full.retries]
    values = {full.strategy: full.sum_bytes if by_memory else full.step.seconds for full in fitting}
    assert len(values) > 1 and values[chosen.strategy] <= min(values.values()) * (1 + TELLS)


def test_nothing_that_fits_is_faster() -> None:
    """With room for all stages of ZeRO and both micro-batches, and with room for half of them."""
    roomy = search(activation_checkpointing="none")
    assert_nothing_is_better(roomy)
    peaks = sorted(full.peak.bytes for full in confirmed(roomy))
    assert_nothing_is_better(search(peaks[len(peaks) // 2] / 2**20, activation_checkpointing="none"))


@pytest.mark.long
@pytest.mark.parametrize("objective", ["seconds", "memory"])
def test_nothing_in_the_space_is_better(objective: str) -> None:
    roomy = search(objective=objective)
    assert_nothing_is_better(roomy)
    peaks = sorted(full.peak.bytes for full in confirmed(roomy))
    for share in (4, 2):
        assert_nothing_is_better(search(peaks[len(peaks) // share] / 2**20, objective))


def lossy(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """An allocator that loses a share of its memory, and cannot make room."""
    run = predict.dry_run

    def with_losses(*arguments: Any, **options: Any) -> DryRun:
        made = run(*arguments, **options)
        if made.replay is None:
            return made
        reserved = int(made.replay.allocated * (1 + share))
        return replace(made, replay=replace(made.replay, reserved=reserved))

    monkeypatch.setattr(predict, "dry_run", with_losses)
    monkeypatch.setattr(predict, "_reserves", lambda run, *_: (run.replay.reserved, None, None))


@pytest.mark.long
def test_fragmentation_of_what_failed_ends_the_search_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of all stages of ZeRO fit, but the allocator loses as much again: the first failure tells."""
    pins: dict[str, Any] = {"devices": 8, "activation_checkpointing": "none", "micro_batch_size": 2}
    lossy(monkeypatch, 1.0)
    least = min(full.peak.bytes for full in confirmed(search(**pins)))
    learn, chosen, made = LearnedFragmentation.learn, [], []
    for learning in (True, False):
        predictor = search(1.02 * least / 2**20, **pins).predictor
        monkeypatch.setattr(LearnedFragmentation, "learn", learn if learning else lambda *_: None)
        chosen.append(choose_strategy(predictor))
        assert fits(predictor, chosen[-1])
        made.append(len(predictor._predictions))
    assert chosen[0].strategy == chosen[1].strategy
    assert made[0] < made[1]


def test_fragmentation_is_that_of_the_same_recomputation_and_loss() -> None:
    """Of those that failed, the least; of other recomputation or loss, at most half. Exact figures have their own."""
    of = search(1000)
    plain = strategy_from({"precision": "bf16", "zero_stage": 1, "micro_batch_size": 2})

    def may_fit(strategy: Strategy, share: float, exact: bool = False) -> bool:
        size = int(share * of.predictor.budget_bytes)
        return of.fragmentation.allows(Estimate(strategy, exact, size, size, 0, 0, 1.0, {}))

    full = of.predictor.confirm(plain)
    assert full.run.replay is not None
    for reserved in (1300, 1200, 1400):
        replay = replace(full.run.replay, allocated=1000, reserved=reserved)
        of.fragmentation.learn(replace(full, run=replace(full.run, replay=replay)))
    for change in ({}, {"zero_stage": 3}, {"micro_batch_size": 1}, {"compile": "block"}):
        strategy = plain.with_values(**change)
        assert may_fit(strategy, 0.83) and not may_fit(strategy, 0.87) and may_fit(strategy, 0.99, exact=True)
    for change in ({"loss": "chunked"}, {"activation_checkpointing": "full"}, {"offload": "activations"}):
        assert may_fit(plain.with_values(**change), 0.9)


def test_a_faster_strategy_that_only_fragmentation_rules_out_gets_a_dry_run() -> None:
    """It is chosen if it fits after all: a smaller micro-batch may leave less fragmentation than the failed one."""
    of = search(4000)
    values = {"precision": "bf16", "micro_batch_size": 1, "zero_stage": 1}
    slower, faster = (
        of.predictor.confirm(strategy_from(values | {"activation_checkpointing": kind}))
        for kind in ("full", "none")
    )
    assert faster.step.seconds < slower.step.seconds and of._or_doubtful(slower) is slower
    estimate = replace(of.predictor.estimate(faster.strategy), exact=False, seconds=slower.step.seconds / 2)
    of.fragmentation.doubtful[faster.strategy] = estimate
    assert of._or_doubtful(slower) is slower, "no failed strategy had a larger micro-batch"
    of.failed.add(faster.strategy.with_values(micro_batch_size=2))
    assert of._or_doubtful(slower) is faster
    assert of._or_doubtful(faster) is faster


@pytest.mark.parametrize(("computing", "estimated"), [(0.95, False), (0.5, True)])
def test_stages_are_estimated_only_where_they_may_be_faster(computing: float, estimated: bool) -> None:
    """Stages divide the computation as data parallelism does, so its seconds bound both."""
    alone = {"tensor_parallel": 1, "sequence_parallel": 1, "zero_stage": 0, "precision": "bf16"}
    pinned = {"loss": "logits", "activation_checkpointing": "none", "micro_batch_size": 1}
    model = {**MODEL, "layers": 5}
    asked = recipe("2xA100-80GB", strategy=alone | pinned, model=model, batch_size=8)
    of = StrategySearch(Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster)), space(asked))
    flat = next(iter(of.walked.values()))[0]
    of.fitting = [Estimate(flat, False, 1, 1, 0, 0, 1.0, {})]
    of.reference = computing, of._sequences(flat)
    assert bool(of._stage_estimates()) == estimated
