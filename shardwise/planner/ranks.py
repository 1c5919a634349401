"""A strategy's prediction: the memory of its worst rank, and the time of all ranks together.

Ranks that hold different blocks differ in memory. Their place (``technique/place.py``) says which of them to look at,
and how their times combine. In small worlds a rank of every stage is dry-run in full, and the worst is shown. In large
worlds a shortened dry run of all kinds of ranks says which is the worst, and that one is dry-run in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardwise.core.plan import StepEstimate
from shardwise.core.strategy import Layout, Strategy
from shardwise.dryrun.run import place_of
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint
from shardwise.planner.predict import Prediction, predict
from shardwise.planner.read_ahead import ReadAhead
from shardwise.planner.timing import PASS_PHASES, predicted_step_time
from shardwise.recipe.sections import Recipe
from shardwise.technique import has_stages, layout_of, micro_batches
from shardwise.technique.place import RankTime, WholeStep

EVERY_RANK = 8
"""Worlds up to this size are dry-run on every stage, and where shards are uneven on every rank; of larger ones only the
first rank of each kind, which holds most: shards are cut from the front."""


def predict_worst(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    cluster: Cluster,
    *,
    whole: bool = True,
    budget: int | None = None,
    seen: dict[tuple[Strategy, int], Prediction] | None = None,
) -> Prediction:
    """The prediction of the rank that needs most.

    Args:
        whole: whether the shown rank runs a whole step. Otherwise the first rank ends it if that needs too much.
        seen: predictions by strategy and rank that have been made, and are not made again; new ones are added.
    """
    layout = layout_of(strategy, cluster.world_size)
    look = partial(predict, recipe, blueprint, strategy, cluster, budget=budget)
    if not has_stages(layout):
        return look()
    looks = _Looks(look, strategy, {} if seen is None else seen)
    small = cluster.world_size <= EVERY_RANK
    start = place_of(recipe, blueprint, strategy, cluster, rank=0)
    assert start is not None
    ranks = [number * layout.stride(start.axis) for number in start.ranks_to_probe(every=small and whole)]
    known = looks.at(ranks, whole and small, enough=None if whole else budget)
    worst = max(known, key=lambda rank: known[rank].peak.bytes if whole and small else known[rank].sum_bytes)
    if whole and not small:
        known |= looks.at([worst], whole=True)
    pipeline = known[ranks[0]].run.place
    assert pipeline is not None
    stride = layout.stride(pipeline.axis)
    count = micro_batches(strategy, layout, recipe.batch_size)
    probed = {rank // stride: prediction for rank, prediction in known.items()}
    every = [probed[pipeline.stand_in(number, probed)] for number in range(pipeline.ranks)]
    times = [_rank_time(prediction, layout, cluster) for prediction in every]
    step = pipeline.combined(times, count, worst // stride, known[worst].run.pass_bytes)
    return replace(
        known[worst],
        # Which rank takes most of the host or of a disk need not be the one that takes most of its device.
        host=max((prediction.host for prediction in known.values()), key=lambda host: host.total),
        disk_bytes=max(prediction.disk_bytes for prediction in known.values()),
        step=_step(known[worst].step, every, step),
        timetable=step.timetable,
        parameters=blueprint.parameter_count(),
        allocated_by_rank={rank: prediction.allocated_bytes for rank, prediction in known.items()},
    )


@dataclass(frozen=True)
class _Looks:
    """Predictions of single ranks of a strategy."""

    predict: Callable[..., Prediction]
    strategy: Strategy
    seen: dict[tuple[Strategy, int], Prediction]

    def at(self, ranks: Sequence[int], whole: bool, enough: int | None = None) -> dict[int, Prediction]:
        """Predictions of these ranks, on all cores; only of the first one if it needs more than ``enough`` bytes."""
        missing = [rank for rank in ranks if self._known(rank, whole) is None]
        predictions: dict[int, Prediction] = {}
        with ReadAhead(lambda rank: self.predict(rank=rank, whole=whole), missing) as ahead:
            for rank in ranks:
                predictions[rank] = self._known(rank, whole) or ahead.get(missing.index(rank))
                self.seen[self.strategy, rank] = predictions[rank]
                if enough is not None and predictions[ranks[0]].sum_bytes > enough:
                    break
        return predictions

    def _known(self, rank: int, whole: bool) -> Prediction | None:
        known = self.seen.get((self.strategy, rank))
        return known if known is not None and (known.whole or not whole) else None


def _rank_time(prediction: Prediction, layout: Layout, cluster: Cluster) -> RankTime:
    time = predicted_step_time(prediction.cost, layout, cluster)
    forward, backward = (time.passes.get(phase, 0.0) for phase in PASS_PHASES)
    return RankTime(time.seconds, forward, backward, time.sending)


def _step(step: StepEstimate, every: Sequence[Prediction], whole: WholeStep) -> StepEstimate:
    """One step of all ranks together."""
    slowest = max(every, key=lambda prediction: prediction.step.seconds).step
    return replace(
        step,
        seconds=whole.seconds,
        mfu=step.mfu * step.seconds / whole.seconds,
        split={**slowest.split, whole.waiting: max(0.0, whole.seconds - slowest.seconds)},
    )
