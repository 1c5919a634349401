"""The peak of a compared strategy is the one of its own plan, or it says that it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from shardwise.core.plan import Candidate
from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import compare, read_ahead
from shardwise.planner.compare import Neighbours, compared_candidates
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.quick import UNSURE, figures_in_proportion, quick_figures
from shardwise.recipe.load import recipe_of
from shardwise.report.tables import peak_of
from shardwise.technique import ORDER, SETTINGS, strategy_from
from shardwise.technique.checkpointing import ACTIVATION_CHECKPOINTING

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
    chosen = predictor.predict(plain, quick=False)
    predictor.predict(other, quick=True)
    by_strategy = {candidate.strategy: candidate for candidate in compared_candidates(predictor, chosen)}
    assert by_strategy[plain].peak_is == "counted"
    return by_strategy[other], predictor.worst(other, quick=False)


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


@pytest.mark.parametrize("ranks", [None, [0]])
def test_of_one_rank_that_need_not_be_the_worst_it_is_marked(ranks: list[int] | None) -> None:
    asked = recipe_of(
        {"model": {**MODEL, "layers": 2}, "data": {"sequence_length": 32}, "steps": 2, "batch_size": 2}
        | {"cluster": {"devices_per_node": 2}},
        SETTINGS,
    )
    predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
    strategy = strategy_from({"pipeline_parallel": 2})
    predictor.predict(strategy, quick=True, ranks=ranks)
    assert predictor.candidates[strategy].peak_is == ("counted" if ranks is None else "estimated")


def test_a_pinned_precision_is_compared_with_what_the_device_has() -> None:
    """An A100 has no units for 8 bits. A recipe may pin their emulation, but that of bf16 does not ask for it."""
    values = {"model": MODEL, "data": {"sequence_length": 64}, "steps": 2, "batch_size": 8}
    narrow = strategy_from({"precision": "fp8"})
    for pinned, expected in (("bf16", []), ("fp8", [narrow])):
        cluster = {"preset": "1xA100-80GB"}
        asked = recipe_of({**values, "cluster": cluster, "strategy": {"precision": pinned}}, SETTINGS)
        predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
        assert list(predictor.possible([narrow])) == expected


def test_what_fits_only_by_emptying_the_cache_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prediction, "retries", property(lambda found: 1))
    candidate, _ = compared({"device": "cpu"})
    assert candidate.verdict == "tight" and "step time" in candidate.reason


def small(devices: int) -> Predictor:
    values = {
        "model": MODEL,
        "data": {"sequence_length": 64},
        "steps": 2,
        "batch_size": 4,
        "cluster": {"device": "cpu", "devices_per_node": devices},
    }
    asked = recipe_of(values, SETTINGS)
    return Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))


def neighbours(*expected: Strategy, of: Strategy) -> Mapping[Strategy, Candidate]:
    """Candidates after the neighbours of a strategy are recorded, where others were expected before it."""
    predictor = small(devices=1)
    with Neighbours(predictor) as ahead:
        for strategy in expected:
            ahead.expect(strategy)
        ahead.record(predictor.predict(of, quick=False))
    assert not read_ahead._children
    return predictor.candidates


def test_neighbours_are_the_same_whatever_was_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "usable_cores", lambda: 2)
    recomputing = [technique for technique in ORDER if ACTIVATION_CHECKPOINTING in technique.settings]
    monkeypatch.setattr(compare, "ORDER", recomputing)
    chosen = strategy_from({"micro_batch_size": 2, "precision": "fp32"})
    other = chosen.with_values(activation_checkpointing="full")
    found = neighbours(of=chosen)
    assert other in found and all(len(chosen.differences(each)) <= 1 for each in found)
    assert found == neighbours(chosen, of=chosen) == neighbours(other, chosen, of=chosen)


@pytest.mark.parametrize(
    ("devices", "precision", "stages"), [(1, "fp32", set()), (1, "bf16", {0}), (2, "fp32", {1, 2, 3})]
)
def test_stages_of_zero_are_neighbours_where_they_differ(
    devices: int, precision: str, stages: set[int]
) -> None:
    """A single rank has nothing to shard; its stage 1 keeps the cast weights."""
    stage = 0 if precision == "fp32" else 1
    strategy = strategy_from({"precision": precision, "zero_stage": stage, "micro_batch_size": 2})
    listed = Neighbours(small(devices))._unknown(strategy)
    assert {each.values["zero_stage"] for each in listed} - {stage} == stages


def test_neighbours_of_stages_are_predicted_once_their_worst_rank_is_known() -> None:
    staged = strategy_from({"micro_batch_size": 1, "precision": "fp32", "pipeline_parallel": 2})
    predictor = small(devices=2)
    with Neighbours(predictor) as ahead:
        ahead.expect(staged)
        assert not predictor.candidates and not read_ahead._children


def test_neighbours_of_stages_in_a_large_world_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank of a neighbour with stages is dry-run; its figures are near those that a dry run gives."""
    asked = recipe_of(
        {"model": {**MODEL, "layers": 6, "width": 128}, "data": {"sequence_length": 64}, "steps": 2}
        | {"batch_size": 128, "cluster": {"preset": "16xH100-80GB"}, "strategy": {"pipeline_parallel": 2}},
        SETTINGS,
    )
    predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, "pipeline_parallel": 2})
    chosen = predictor.predict(strategy, quick=False)
    predicted = list[Strategy]()
    predict = Predictor.predict

    def noted(self: Predictor, strategy: Strategy, **options: Any) -> Prediction:
        predicted.append(strategy)
        return predict(self, strategy, **options)

    neighbour = strategy.with_values(activation_checkpointing="full")
    monkeypatch.setattr(Predictor, "predict", noted)
    monkeypatch.setattr(Predictor, "possible", lambda *_: iter([neighbour]))
    with Neighbours(predictor) as neighbours:
        neighbours.record(chosen)
    candidate = predictor.candidates[neighbour]
    assert not predicted and candidate.peak_is == "estimated"
    own = predict(predictor, neighbour, quick=True)
    assert candidate.step_seconds == pytest.approx(own.step.seconds, rel=0.1)
    assert candidate.peak_bytes == pytest.approx(own.sum_bytes, rel=0.1)


def test_where_it_is_not_sure_to_fit_ranks_are_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe_of(
        {"model": {**MODEL, "layers": 6}, "data": {"sequence_length": 64}, "steps": 2, "batch_size": 128}
        | {"cluster": {"preset": "16xH100-80GB"}},
        SETTINGS,
    )
    predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
    strategy = strategy_from({"precision": "bf16", "micro_batch_size": 2, "pipeline_parallel": 2})
    neighbour = strategy.with_values(activation_checkpointing="full")
    known = quick_figures(predictor, strategy)
    found = figures_in_proportion(predictor, neighbour, known)
    assert found is not None and predictor.candidates[neighbour].peak_is == "estimated"
    monkeypatch.setattr(Predictor, "budget_bytes", int(found.bytes * (1 + UNSURE / 2)))
    assert figures_in_proportion(predictor, neighbour, known) is None
