"""The peak of a compared strategy is the one of its own plan, or it says that it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.plan import Candidate
from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import compare
from shardwise.planner.compare import compared_candidates, estimate_neighbours
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.verdicts import Estimate, Verdicts
from shardwise.recipe.load import recipe_of
from shardwise.report.tables import peak_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.tiers import quick

MODEL = {"layers": 5, "width": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "vocab": 256, "context": 64}


def compared(cluster: dict[str, object]) -> tuple[Candidate, Prediction]:
    """Full recomputation as a neighbour of a plan without, and its own prediction."""
    asked = recipe_of(
        {
            "model": MODEL,
            "data": {"sequence_length": 64},
            "steps": 2,
            "batch_size": 8,
            "cluster": cluster,
        },
        SETTINGS,
    )
    predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
    plain, other = (
        strategy_from({"micro_batch_size": 8, "activation_checkpointing": kind}) for kind in ("none", "full")
    )
    chosen = predictor.confirm(plain)
    predictor.relative(other, predictor.estimate(plain))
    by_strategy = {candidate.strategy: candidate for candidate in compared_candidates(predictor, chosen)}
    assert by_strategy[plain].peak_is == "counted"
    return by_strategy[other], predictor.confirm(other)


def test_without_a_caching_allocator_it_is_the_same() -> None:
    candidate, own = compared({"device": "cpu"})
    assert candidate.peak_is == "counted" and candidate.peak_bytes == own.peak.bytes
    assert not peak_of(candidate).startswith("~") and "about" not in candidate.reason


def test_with_fragmentation_of_another_strategy_it_is_marked() -> None:
    candidate, own = compared({"preset": "1xH100-80GB"})
    assert candidate.peak_is == "estimated" and candidate.peak_bytes != own.peak.bytes
    assert peak_of(candidate).startswith("~ ") and "about" in candidate.reason


def test_a_prediction_that_fails_before_fragmentation_is_a_lower_bound() -> None:
    candidate, own = compared({"preset": "1xH100-80GB", "memory_gib": 0.01})
    assert candidate.verdict == "does not fit" and candidate.peak_bytes < own.peak.bytes
    assert candidate.peak_is == "at least" and peak_of(candidate).startswith("≥ ")


def test_a_pinned_precision_is_compared_with_what_the_device_has() -> None:
    """An A100 has no units for 8 bits. A recipe may pin their emulation, but that of bf16 does not ask for it."""
    values = {"model": MODEL, "data": {"sequence_length": 64}, "steps": 2, "batch_size": 8}
    narrow = strategy_from({"precision": "fp8"})
    for pinned, expected in (("bf16", []), ("fp8", [narrow])):
        cluster = {"preset": "1xA100-80GB"}
        asked = recipe_of({**values, "cluster": cluster, "strategy": {"precision": pinned}}, SETTINGS)
        predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
        assert list(predictor.possible([narrow])) == expected


def test_what_fits_only_by_emptying_the_cache_is_tight() -> None:
    predictor = small(devices=1)
    strategy = strategy_from({"micro_batch_size": 2})
    exact = Verdicts(predictor.recipe, predictor.cluster).exact(predictor.confirm(strategy))
    other = replace(exact, strategy=strategy.with_values(micro_batch_size=4), retries=1)
    predictor.verdicts.judge(other)
    _, candidate = compared_candidates(predictor, predictor.confirm(strategy))
    assert candidate.verdict == "tight" and "step time" in candidate.reason


def small(devices: int, layers: int = 5, **cluster: Any) -> Predictor:
    values = {
        "model": {**MODEL, "layers": layers},
        "data": {"sequence_length": 64},
        "steps": 2,
        "batch_size": 4 * devices,
        "cluster": cluster or {"device": "cpu", "devices_per_node": devices},
    }
    asked = recipe_of(values, SETTINGS)
    return Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))


@pytest.mark.parametrize(
    ("devices", "precision", "stages"), [(1, "fp32", set()), (1, "bf16", {0}), (2, "fp32", {1, 2, 3})]
)
def test_stages_of_zero_are_neighbours_where_they_differ(
    devices: int, precision: str, stages: set[int]
) -> None:
    """A single rank has nothing to shard; its stage 1 keeps the cast weights."""
    stage = 0 if precision == "fp32" else 1
    strategy = strategy_from({"precision": precision, "zero_stage": stage, "micro_batch_size": 2})
    listed = set(compare._neighbours(small(devices), strategy))
    assert {each.values["zero_stage"] for each in listed} - {stage} == stages
    assert all(len(strategy.differences(each)) == 1 for each in listed)


NEAR: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero_stage": 3}, {"activation_checkpointing": "full"}),
    ({"zero_stage": 3}, {"zero_stage": 1}),
    ({"zero_stage": 1}, {"micro_batch_size": 4}),
    ({"activation_checkpointing": "full"}, {"precision": "fp16"}),
    ({"zero_stage": 1}, {"tensor_parallel": 2}),
]


@pytest.mark.parametrize(("own", "change"), quick(NEAR, NEAR[2]))
def test_a_neighbour_is_estimated_from_what_is_chosen(
    own: dict[str, Any], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a dry run of its whole step, within a few percent of it."""
    predictor = small(devices=4, layers=6, preset="4xH100-80GB")
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, **own})
    chosen, neighbour = predictor.confirm(strategy), strategy.with_values(**change)
    monkeypatch.setattr(compare, "_trials", lambda *_: iter([[neighbour]]))
    estimate_neighbours(predictor, chosen)
    assert set(predictor._predictions) == {strategy}
    candidate = predictor.candidates[neighbour]
    assert candidate.peak_is == "estimated"
    whole = predictor.confirm(neighbour)
    assert candidate.step_seconds == pytest.approx(whole.step.seconds, rel=0.03)
    assert candidate.peak_bytes == pytest.approx(whole.sum_bytes, rel=0.03)


@pytest.mark.long
def test_neighbours_of_stages_are_estimated() -> None:
    """No rank of a neighbour with stages is dry-run; its figures are near those that dry runs give."""
    predictor = small(devices=16, layers=8, preset="16xH100-80GB")
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 1, "pipeline_parallel": 2})
    neighbour = strategy.with_values(activation_checkpointing="full")
    predictor.estimate(strategy)
    ranks = set(predictor._ranks)
    found = predictor.relative(neighbour, predictor.estimate(strategy))
    assert set(predictor._ranks) == ranks and predictor.candidates[neighbour].peak_is == "estimated"
    fresh = small(devices=16, layers=8, preset="16xH100-80GB")
    own = fresh.estimate(neighbour)
    assert found.seconds == pytest.approx(own.seconds, rel=0.1)
    assert found.tensors == pytest.approx(own.tensors, rel=0.1)


@pytest.mark.parametrize(
    ("kept", "saved"), [(40, 7), (20, 3.5), (0, 0), (80, 14), (200, 14)], ids=lambda value: str(value)
)
def test_compiled_blocks_save_the_same_part_of_what_a_neighbour_keeps(kept: float, saved: float) -> None:
    """They save 7 GiB of the 40 GiB of activations of the known strategy; nothing where all is recomputed."""
    predictor = small(devices=8, layers=2, preset="8xH100-80GB")
    strategy = strategy_from({"precision": "bf16", "compile": "block"})
    neighbour = strategy.with_values(activation_checkpointing="full")
    plain, other = (one.with_values(compile="none") for one in (strategy, neighbour))
    gib = 2**30

    def estimate(of: Strategy, tensors: float, activations: float) -> Estimate:
        return Estimate(of, False, int(tensors * gib), int(tensors * gib), int(activations * gib), 0, 1.0, {})

    predictor._composed[plain] = estimate(plain, 75, 40)
    predictor._composed[other] = estimate(other, 35 + kept, kept)
    found = predictor.relative(neighbour, estimate(strategy, 68, 33))
    assert found.tensors == pytest.approx((35 + kept - saved) * gib)
