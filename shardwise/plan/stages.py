"""A strategy's prediction: that of its worst rank, in a pipeline with the time of all of them together.

The ranks of a pipeline differ: the first holds the embedding and the most micro-batches, the last one the head. A rank
of every kind is dry-run, and in small worlds a rank of every stage; the worst is what is shown. In large worlds a full
prediction is quick for all kinds, and full for the worst of them. A quick one ends with the first rank where that
needs too much: what the others need changes nothing.

A step takes as long as its schedule when that is played (core/pipeline_schedule.py) with what each rank computes of a
micro-batch forward and backward, and then what the slowest rank does beside: exposed communication, messages between
stages among it, and the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.core.cluster import Cluster
from shardwise.core.pipeline_plan import PipelinePlan
from shardwise.core.plan import StepEstimate
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Strategy
from shardwise.model.blueprint import Blueprint
from shardwise.plan.predict import Prediction, predict
from shardwise.plan.timing import mfu, phase_seconds
from shardwise.technique import layout_of, micro_batches
from shardwise.technique.base import Pipeline

EVERY_RANK = 8
"""Worlds up to this size are dry-run on every stage, and where shards are uneven on every rank; of larger ones only the
first rank of each kind, which holds most: shards are cut from the front."""


def predict_worst(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    cluster: Cluster,
    *,
    quick: bool = False,
    budget: int | None = None,
    ranks: Sequence[int] | None = None,
    seen: dict[tuple[Strategy, int], Prediction] | None = None,
) -> Prediction:
    """The prediction of the rank that needs most.

    Args:
        ranks: the only ones to look at, where they are given.
        seen: quick predictions that have been made, and are not made again; new ones are added.
    """
    seen = {} if seen is None else seen

    def of(rank: int, quick: bool) -> Prediction:
        if quick and (strategy, rank) in seen:
            return seen[strategy, rank]
        found = predict(recipe, blueprint, strategy, cluster, rank=rank, quick=quick, budget=budget)
        if quick:
            seen[strategy, rank] = found
        return found

    small = cluster.world_size <= EVERY_RANK
    stride = layout_of(strategy, cluster.world_size).stride("pipeline")
    look = quick or (not small and stride < cluster.world_size)
    known = {rank: of(rank, look) for rank in (ranks or [0])}
    pipeline = next(iter(known.values())).run.pipeline
    if pipeline is None:
        return next(iter(known.values()))
    if ranks is None and not (quick and budget is not None and known[0].sum_bytes > budget):
        places = range(pipeline.ranks) if small and not quick else pipeline.distinct
        known |= {place * stride: of(place * stride, look) for place in places if place > 0}
    worst = max(known, key=lambda rank: known[rank].peak.bytes)
    if look and not quick:
        known[worst] = of(worst, False)
    count = micro_batches(strategy, known[worst].layout, recipe.batch_size)
    by_place = {rank // stride: found for rank, found in known.items()}
    like = [by_place[_nearest(place, by_place, pipeline)] for place in range(pipeline.ranks)]
    played = _pipeline(like, pipeline, count, cluster)
    played = replace(played, place=worst // stride, pass_bytes=known[worst].run.pass_bytes)
    return replace(
        known[worst],
        # Which rank takes most of the host or of a disk need not be the one that takes most of its device.
        host=max((found.host for found in known.values()), key=lambda host: host.total),
        disk_bytes=max(found.disk_bytes for found in known.values()),
        step=_step(known[worst].step, like, played, cluster),
        pipeline=played,
        parameters=blueprint.parameter_count(),
        allocated_by_rank={rank: found.allocated_bytes for rank, found in known.items()},
    )


def _pipeline(like: Sequence[Prediction], pipeline: Pipeline, count: int, cluster: Cluster) -> PipelinePlan:
    """What the pipeline is played with; ``like`` are the predictions that stand for each of its ranks."""
    computed = [phase_seconds(each.cost, cluster) for each in like]
    return PipelinePlan(
        schedule=pipeline.schedule,
        ranks=pipeline.ranks,
        stages_per_rank=pipeline.stages_per_rank,
        micro_batches=count,
        forward=tuple(phases.get("forward", 0.0) / count for phases in computed),
        backward=tuple(phases.get("backward", 0.0) / count for phases in computed),
    )


def _step(
    step: StepEstimate, like: Sequence[Prediction], played: PipelinePlan, cluster: Cluster
) -> StepEstimate:
    """One step of the whole pipeline."""
    beside = max(
        each.step.seconds - played.micro_batches * (forward + backward)
        for each, forward, backward in zip(like, played.forward, played.backward, strict=True)
    )
    slowest = max(like, key=lambda each: each.step.seconds)
    whole = played.step_seconds(played.schedule) + beside
    return replace(
        step,
        seconds=whole,
        mfu=math.fsum(mfu(e.cost, whole, e.run.compute_dtype, cluster) for e in like) / len(like),
        split={**slowest.step.split, "waiting for other stages": max(0.0, whole - slowest.step.seconds)},
    )


def _nearest(place: int, found: Mapping[int, Prediction], pipeline: Pipeline) -> int:
    """The place in a pipeline whose prediction stands for this one's."""
    same = [other for other in found if pipeline.kind(other) == pipeline.kind(place)]
    return min(same or found, key=lambda other: abs(other - place))
