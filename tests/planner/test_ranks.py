"""Ranks that hold different blocks: their predictions do not depend on the processes that make them."""

from __future__ import annotations

import pickle

import pytest

from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import read_ahead
from shardwise.planner.predict import Prediction, predict
from shardwise.planner.ranks import predict_worst
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.tiers import quick

ASKED = recipe_of(
    {
        "model": {
            "layers": 5,
            "width": 32,
            "heads": 2,
            "kv_heads": 2,
            "ffn": 64,
            "vocab": 256,
            "context": 64,
        },
        "data": {"sequence_length": 64},
        "steps": 2,
        "batch_size": 16,
        "cluster": {"preset": "8xA100-80GB", "nodes": 2},
    },
    SETTINGS,
)
STAGED = strategy_from({"micro_batch_size": 1, "precision": "fp32", "pipeline_parallel": 4})


def worst(cores: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> Prediction:
    monkeypatch.setattr(read_ahead, "usable_cores", lambda: cores)
    return predict_worst(ASKED, blueprint_of(ASKED), STAGED, cluster_of(ASKED.cluster), whole=whole)


@pytest.mark.parametrize("whole", [False, True])
def test_two_cores_predict_as_one(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (worst(cores, whole, monkeypatch) for cores in (1, 2))
    assert len(one.allocated_by_rank) >= 3 and one.whole == two.whole
    for name in ("rank", "peak", "step", "cost", "host", "timetable", "allocated_by_rank"):
        assert getattr(one, name) == getattr(two, name), name


def test_a_prediction_of_a_stage_can_be_sent_to_another_process() -> None:
    found = predict(ASKED, blueprint_of(ASKED), STAGED, cluster_of(ASKED.cluster), rank=0, whole=False)
    sent = pickle.loads(pickle.dumps(found))  # noqa: S301 - its own bytes
    assert found.run.place is not None and sent.run.place == found.run.place
    assert sent.peak == found.peak and sent.step == found.step


def test_a_shortened_prediction_of_a_stage_is_the_whole_one() -> None:
    """Its micro-batches in flight are extrapolated."""
    short, full = (
        predict(ASKED, blueprint_of(ASKED), STAGED, cluster_of(ASKED.cluster), rank=0, whole=how)
        for how in (False, True)
    )
    assert full.whole and not short.whole
    assert short.sum_bytes == pytest.approx(full.sum_bytes, rel=0.01)
    assert short.cost.flops == full.cost.flops


@pytest.mark.parametrize(
    ("stages", "rank", "batch", "extrapolated"),
    quick(
        [(4, 0, 16, True), (4, 12, 16, False), (8, 2, 14, True), (8, 14, 14, True)],
        (4, 12, 16, False),
        (8, 2, 14, True),
    ),
)
def test_a_shortened_prediction_of_interleaved_stages_is_the_whole_one(
    stages: int, rank: int, batch: int, extrapolated: bool
) -> None:
    """Extrapolated where all forward passes come first: pass by pass, as with more of them another is the highest.

    So are the passes of the last rank, whose last stage holds one micro-batch at a time. With more micro-batches than
    stages there are several groups of them, which are not extrapolated.

    A group that is full may have one message more under way.
    """
    model = ASKED.model.model_copy(update={"layers": 2 * stages})
    asked = ASKED.model_copy(update={"model": model, "batch_size": batch})
    staged = STAGED.with_values(
        pipeline_parallel=stages,
        pipeline_schedule="interleaved",
        activation_checkpointing="full",
        loss="chunked",
        zero_stage=1,
        precision="bf16",
    )
    short, full = (
        predict(asked, blueprint_of(asked), staged, cluster_of(ASKED.cluster), rank=rank, whole=how)
        for how in (False, True)
    )
    assert full.whole and not short.whole and short.run.place is not None
    count = batch * stages // 16
    assert (short.run.place.shortcut(count) is not None) is extrapolated
    tensors = [found.sum_bytes - found.peak.ledger.overhead for found in (short, full)]
    message = 64 * 32 * 2
    assert tensors[0] == pytest.approx(tensors[1], rel=0.01, abs=message)
    assert short.cost.flops == full.cost.flops


def test_the_worst_rank_is_the_one_with_most_tensors_where_some_ranks_lack_their_fragmentation() -> None:
    """Only the last rank gets a full prediction at first: its forward passes do not all come first."""
    model = ASKED.model.model_copy(update={"layers": 8, "width": 64})
    asked = ASKED.model_copy(update={"model": model})
    staged = STAGED.with_values(pipeline_schedule="interleaved", zero_stage=1)
    arguments = (asked, blueprint_of(asked), staged, cluster_of(asked.cluster))
    found = predict_worst(*arguments)
    sizes = {rank: predict(*arguments, rank=rank).sum_bytes for rank in found.allocated_by_rank}
    assert len(sizes) == 3 and found.whole
    assert found.rank == max(sizes, key=lambda rank: sizes[rank])
