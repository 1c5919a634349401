"""Choosing: the fastest strategy that fits, the largest micro-batch, and reasons in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.core.json_file import parse_json
from shardwise.core.plan import Plan
from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import cluster_of
from shardwise.hardware.kinds import DEVICE_KINDS
from shardwise.model.open import blueprint_of
from shardwise.planner.predict import predict
from shardwise.planner.predictor import Predictor
from shardwise.planner.search import plan_for
from shardwise.planner.space import Space
from shardwise.planner.verdicts import Verdicts
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS, broken_rules, layout_of, strategy_from
from shardwise.technique.zero import ZERO_STAGE

MODEL = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 704, "vocab": 1024, "context": 128}
DEEP = MODEL | {"layers": 6}

ONE_AXIS = {"tensor_parallel": 1, "sequence_parallel": 1, "pipeline_parallel": 1}
"""Data parallelism alone; tests/planner/test_choose.py looks at the other axes."""


def recipe(
    memory_mib: float | None = None, batch_size: int = 32, model: dict[str, Any] = MODEL, **strategy: Any
) -> Recipe:
    cluster: dict[str, Any] = {"preset": "4xA100-80GB"}
    if memory_mib is not None:
        cluster["memory_gib"] = memory_mib / 1024 / (1 - DEVICE_KINDS["cuda"].reserve)
    values = {
        "model": model,
        "data": {"sequence_length": 128},
        "steps": 2,
        "batch_size": batch_size,
        "cluster": cluster,
        "strategy": {"precision": "bf16", "loss": "logits", **ONE_AXIS, **strategy},
    }
    return recipe_of(values, SETTINGS)


def planned(asked: Recipe, *, compare: bool = False) -> Plan:
    return plan_for(asked, blueprint_of(asked), cluster_of(asked.cluster), compare=compare)


def needed_mib(stage: int, size: int) -> float:
    """Without fragmentation."""
    asked = recipe(model=DEEP)
    strategy = strategy_from({"precision": "bf16", "zero_stage": stage, "micro_batch_size": size})
    return predict(asked, blueprint_of(asked), strategy, cluster_of(asked.cluster)).sum_bytes / 2**20


def test_with_room_to_spare_it_takes_one_pass_without_recomputation() -> None:
    """Stage 1 divides the work of the optimizer, for the traffic of stage 0; further stages gain nothing."""
    plan = planned(recipe())
    assert plan.fits and plan.strategy[ZERO_STAGE] == 1 and plan.strategy[MICRO_BATCH_SIZE] == 8
    assert plan.micro_batches == 1
    assert {c.strategy[ZERO_STAGE] for c in plan.candidates} == {0, 1, 2, 3}
    assert {c.strategy.values["activation_checkpointing"] for c in plan.candidates} == {"none"}, (
        "never faster"
    )
    assert [c.verdict for c in plan.candidates].count("chosen") == 1


@pytest.mark.long
def test_it_takes_the_fastest_stage_and_the_largest_micro_batch_that_fit() -> None:
    """Just too little for the smallest micro-batch of stage 0: another stage, and why."""
    limit = needed_mib(0, 1) - 1
    plan = planned(recipe(limit, model=DEEP, activation_checkpointing="none"))
    stage, size = plan.strategy[ZERO_STAGE], plan.strategy[MICRO_BATCH_SIZE]
    assert plan.fits and stage > 0
    assert needed_mib(stage, size) <= limit
    passed = {(c.strategy[ZERO_STAGE], c.strategy[MICRO_BATCH_SIZE]): c for c in plan.candidates}
    refused = {key: c.reason for key, c in passed.items() if c.verdict == "does not fit"}
    assert (stage, 2 * size) in refused or "empties its cache" in passed[stage, 2 * size].reason
    assert (0, 1) in refused and not any(c.verdict == "fits" for (s, _), c in passed.items() if s == 0)
    assert all("too much" in r or "alone" in r or "fragmentation" in r for r in refused.values())
    assert {s for s, _ in passed} == {0, 1, 2, 3}
    assert plan.step.seconds <= min(c.step_seconds for c in plan.candidates if c.verdict == "fits")


def test_a_pipeline_takes_the_fastest_micro_batch_not_the_largest() -> None:
    """One micro-batch in a pipeline of two leaves each rank idle for half of the step."""
    wide = DEEP | {
        "width": 2048,
        "ffn": 8192,
        "heads": 16,
        "kv_heads": 16,
    }  # so that kernels outlast launches
    asked = recipe(model=wide, pipeline_parallel=2, pipeline_schedule="1f1b", zero_stage=0)
    plan = planned(asked)
    sizes = {
        c.strategy[MICRO_BATCH_SIZE]: c.step_seconds for c in plan.candidates if c.verdict != "does not fit"
    }
    assert plan.fits and plan.micro_batches > 1 and len(sizes) > 1
    assert plan.step.seconds <= min(sizes.values()) * 1.001, "quick predictions of the others"
    assert any("fastest micro-batch" in reason for reason in plan.reasons)


def test_host_and_disk_are_those_of_the_rank_that_takes_most(tmp_path: Path) -> None:
    """The first stage keeps most activations on its device, the last one's head has most moments."""
    strategy = {"pipeline_parallel": 2, "zero_stage": 0, "micro_batch_size": 2, "pipeline_schedule": "1f1b"}
    asked = recipe(**strategy, offload=f"nvme:{tmp_path}")
    cluster, blueprint = cluster_of(asked.cluster), blueprint_of(asked)
    of = strategy_from(asked.strategy)
    each = [predict(asked, blueprint, of, cluster, rank=rank) for rank in (0, 2)]
    plan = planned(asked)
    assert (
        plan.disk.bytes == max(found.disk_bytes for found in each) > min(found.disk_bytes for found in each)
    )
    assert plan.host.bytes == max(found.host.total for found in each)


@pytest.mark.long
def test_what_is_pinned_is_kept() -> None:
    plan = planned(recipe(zero_stage=3, micro_batch_size=2), compare=True)
    assert plan.strategy[ZERO_STAGE] == 3 and plan.strategy[MICRO_BATCH_SIZE] == 2
    assert plan.micro_batches == 4
    neighbours = {c.line: c.reason for c in plan.candidates if c.verdict == "fits"}
    assert neighbours and all("step time" in reason for reason in neighbours.values())


def test_pinned_replicas_leave_out_meshes_without_room_for_them() -> None:
    """Four stages on four devices leave one device for two replicas."""
    values = {
        "cluster": {"device": "cpu", "devices_per_node": 4},
        "strategy": {"zero_stage": 3, "replicate": 2},
    }
    asked = recipe_of({**recipe().model_dump(mode="json"), **values}, SETTINGS)
    layout = layout_of(planned(asked).strategy, 4)
    assert (layout.degree("replicate"), layout.degree("shard")) == (2, 2)


@pytest.mark.parametrize(("forbidden", "chosen"), [(False, "gathered"), (True, "none")])
def test_a_setting_stays_as_it_is_where_all_its_candidates_break_rules(
    forbidden: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallelism shares out the sequence wherever it can; a rule of another technique may forbid it."""
    key = "tensor_sequence_parallel"

    def with_one_more(strategy: Strategy, *case: Any) -> Iterator[Any]:
        yield from broken_rules(strategy, *case)
        if forbidden and strategy.values[key] != "none":
            yield SimpleNamespace(rule=SimpleNamespace(key=key))

    monkeypatch.setattr("shardwise.planner.space.broken_rules", with_one_more)
    asked = recipe(model=MODEL | {"experts": 4, "expert_ffn": 64}, tensor_parallel=2, expert_parallel=2)
    space = Space(asked, cluster_of(asked.cluster))
    strategies = [one for origins in space.meshes().values() for s in origins for one in space.completions(s)]
    assert {one.values[key] for one in strategies} == {chosen}


def test_a_neighbour_that_cannot_be_predicted_does_not_end_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without the neighbour's dtype, say. The chosen strategy's own error still ends it."""
    from shardwise.planner import predict as module

    run, asked = module.dry_run, recipe(zero_stage=2, micro_batch_size=8, activation_checkpointing="none")
    chosen = strategy_from(asked.strategy)

    def failing(recipe: Any, blueprint: Any, strategy: Any, *rest: Any, **how: Any) -> Any:
        if (strategy == chosen) == chosen_fails:
            raise RuntimeError("no kernel\nfor this")
        return run(recipe, blueprint, strategy, *rest, **how)

    monkeypatch.setattr(module, "dry_run", failing)
    chosen_fails = False
    plan = planned(asked, compare=True)
    first, *others = plan.candidates
    assert first.verdict == "chosen" and {c.strategy[ZERO_STAGE] for c in others} >= {0, 1, 3}
    assert {c.verdict for c in others} == {"could not be predicted"}
    assert {c.reason for c in others} == {"RuntimeError: no kernel for this"}
    (said,) = [reason for reason in plan.reasons if "could not be predicted" in reason]
    assert said.startswith(f"{len(others)} of the compared strategies") and said.endswith(
        "no kernel for this"
    )
    chosen_fails = True
    with pytest.raises(RuntimeError, match="no kernel"):
        planned(asked)


@pytest.mark.long
def test_when_nothing_fits_it_shows_what_comes_closest() -> None:
    plan = planned(recipe(1))
    assert not plan.fits
    assert plan.peak.bytes > plan.capacity_bytes


def test_a_broken_rule_is_refused_with_the_nearest_that_works() -> None:
    with pytest.raises(RecipeError, match="replicate: 2"):
        planned(recipe(zero_stage=3, replicate=3))


def test_the_plan_survives_json() -> None:
    plan = planned(recipe(zero_stage=2))
    again = parse_json(plan.to_json(), Plan, Path("plan.json"))
    assert again.as_dict() == plan.as_dict()
    large = replace(plan, step=replace(plan.step, flops=2**70, model_flops=2**80))  # of 405B weights: 2^65
    assert parse_json(large.to_json(), Plan, Path("plan.json")) == large
    data = plan.as_dict()
    assert sum(data["ledger"].values()) == data["peak"]["bytes"]
    assert set(data["strategy"]) == {s.key for s in SETTINGS}
    assert set(data["step"]) >= {"seconds", "tokens", "flops", "traffic_bytes", "mfu"}


@pytest.mark.long
def test_resharding_llama_3_8b_saves_what_was_published() -> None:
    """torchtitan measured 62.18 and 49.59 GiB on 8 H100 (reshard_after_forward never, default): 12.59 GiB.

    Of tensors alone: theirs are reserved bytes of a run that recomputes some operations, which this one cannot.
    """
    values = {
        "model": {"preset": "llama-3-8b"},
        "data": {"sequence_length": 8192},
        "steps": 1,
        "batch_size": 8,
        "cluster": {"preset": "8xH100-80GB"},
    }
    asked = recipe_of(values, SETTINGS)
    blueprint, cluster = blueprint_of(asked), cluster_of(asked.cluster)
    peaks = []
    for stage in (2, 3):
        strategy = strategy_from({"precision": "bf16", "zero_stage": stage, "micro_batch_size": 1})
        peaks.append(predict(asked, blueprint, strategy, cluster).sum_bytes)
    assert (peaks[0] - peaks[1]) / 2**30 == pytest.approx(12.59, rel=0.01)


@pytest.mark.long
def test_a_batch_of_any_size_takes_few_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each power of two was predicted, and each micro-batch's samples allocated by themselves."""
    predicted: list[int] = []
    estimate_one = Predictor.estimate

    def counted(self: Predictor, strategy: Strategy, **how: Any) -> Any:
        predicted.append(strategy[MICRO_BATCH_SIZE])
        return estimate_one(self, strategy, **how)

    monkeypatch.setattr(Predictor, "estimate", counted)
    assert not planned(recipe(batch_size=10**9, zero_stage=0, activation_checkpointing="none")).fits
    assert len(set(predicted)) <= 3
    predicted.clear()
    assert planned(recipe(batch_size=10**7, zero_stage=0, activation_checkpointing="none")).fits
    assert len(set(predicted)) <= 8


def test_the_search_says_the_best_so_far() -> None:
    """A line before every prediction; the best is the fastest of those that fit, as they are known by then."""
    from shardwise.core.plan import Candidate

    verdicts = Verdicts(recipe(), cluster_of(recipe().cluster))
    assert list(verdicts.best_so_far()) == []
    for stage, seconds, verdict in ((0, 1.0, "does not fit"), (1, 3.0, "fits"), (2, 2.0, "fits")):
        of = strategy_from({"zero_stage": stage})
        verdicts.candidates[of] = Candidate(of, f"zero{stage}", (9 - stage) << 30, seconds, verdict, "")
    assert list(verdicts.best_so_far()) == ["best so far zero2, 2.00 s, 7.00 GiB"]
