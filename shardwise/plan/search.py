"""Choosing a strategy: the plainest one that fits, with the largest micro-batch.

Every setting lists its candidates, cheapest in time first (core/strategy.py). The search walks their product in that
order and takes the first strategy that fits, so it names no technique. For each strategy:

1. The lower bound excludes it without a dry run, if its weights and optimizer state alone are too large.
2. Quick predictions find the micro-batch sizes that may fit, largest first.
3. A full dry run confirms the first of them, with the allocations replayed through the device's allocator.

Ranks that hold different blocks wait less for each other with more micro-batches, so they take a smaller micro-batch
while that is faster. A strategy that fits only if the allocator empties its cache in every step is "tight": it is taken
only when nothing else fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from shardwise.core.plan import DiskSpace, HostMemory, Plan, PlannedPeak, TimelinePoint
from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint
from shardwise.plan.compare import judged, predict_neighbours
from shardwise.plan.explain import assumptions, reasons
from shardwise.plan.predict import Prediction, predict
from shardwise.plan.predictor import Predictor
from shardwise.plan.worst_rank import EVERY_RANK
from shardwise.recipe import lr_scaling as scaling
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    SETTINGS,
    emulated,
    micro_batches,
    one_line,
    refuse_broken,
    refuse_unsupported,
    strategy_from,
)

_MARGIN = 1.1
"""For memory that does not grow in proportion to the micro-batch, such as rounding to pages."""


def plan_for(recipe: Recipe, blueprint: Blueprint, cluster: Cluster, *, compare: bool = True) -> Plan:
    """Check the settings that the recipe pins and choose the others.

    Args:
        compare: also predict what one change of the chosen strategy would cost. This takes most of the time.

    Raises:
        RecipeError: when pinned settings break a rule.
    """
    refuse_broken(recipe, cluster.world_size, lambda key: f"strategy.{key}")
    refuse_unsupported(recipe.strategy, cluster.device, lambda key: f"strategy.{key}")
    predictor = Predictor(recipe, blueprint, cluster)
    chosen = choose(predictor)
    if compare:
        predict_neighbours(predictor, chosen)
    return _plan(predictor, chosen)


def choose(predictor: Predictor) -> Prediction:
    """The first strategy that fits, else a tight one, else the one that needs the least memory."""
    tight: Prediction | None = None
    for strategy in _strategies(predictor):
        for quick, full in _that_fit(predictor, strategy):
            if full.retries == 0:
                return _faster(predictor, quick) or full
            tight = tight or full
    if tight is not None:
        return tight
    too_large = (c for c in predictor.candidates.values() if c.verdict == "does not fit")
    return predictor.predict(min(too_large, key=lambda c: c.peak_bytes).strategy, quick=False)


def _strategies(predictor: Predictor) -> Iterator[Strategy]:
    """Every combination of candidates of the settings that are not pinned, preferred first."""
    pinned = predictor.recipe.strategy
    free = [s for s in SETTINGS if s.candidates and s.key not in pinned]
    for values in product(*(s.candidates for s in free)):
        strategy = strategy_from({**pinned, **{s.key: v for s, v in zip(free, values, strict=True)}})
        if predictor.allowed(strategy):
            yield strategy


def _that_fit(predictor: Predictor, strategy: Strategy) -> Iterator[tuple[Prediction, Prediction]]:
    """Quick and full predictions of the strategy with each micro-batch size that fits, largest first."""
    sizes = predictor.micro_batch_sizes(strategy)
    if not predictor.may_fit(strategy.with_values(micro_batch_size=sizes[-1])):
        return
    largest = float(sizes[0])
    for size in sizes:
        if size > largest:
            continue
        trial = strategy.with_values(micro_batch_size=size)
        quick = predictor.predict(trial, quick=True)
        # Memory is a constant and a part that grows at most in proportion, so a larger size than this cannot fit.
        largest = size * _MARGIN * predictor.budget_bytes / quick.sum_bytes
        if predictor.might_fit(quick):
            full = predictor.predict(trial, quick=False)
            if predictor.fits(full):
                yield quick, full


def _faster(predictor: Predictor, quick: Prediction) -> Prediction | None:
    """The same strategy with a smaller micro-batch, while predictions get faster; None where ranks do not wait."""
    if quick.timetable is None:
        return None
    best = quick
    for size in predictor.micro_batch_sizes(quick.strategy):
        if size >= quick.strategy[MICRO_BATCH_SIZE]:
            continue
        found = predictor.predict(quick.strategy.with_values(micro_batch_size=size), quick=True)
        if found.step.seconds >= best.step.seconds:
            break
        best = found
    if best is quick:
        return None
    full = predictor.predict(best.strategy, quick=False)
    return full if predictor.fits(full) and full.retries == 0 else None


def _plan(predictor: Predictor, chosen: Prediction) -> Plan:
    """The plan of the chosen strategy."""
    recipe, cluster = predictor.recipe, predictor.cluster
    layout, strategy, peak = chosen.layout, chosen.strategy, chosen.peak
    return Plan(
        strategy=strategy,
        line=one_line(strategy, layout, recipe.batch_size),
        world_size=cluster.world_size,
        cluster=cluster.name,
        device=cluster.device.name,
        capacity_bytes=cluster.capacity_bytes,
        reserve_bytes=predictor.reserve_bytes,
        parameters=chosen.parameters,
        peak=PlannedPeak(peak.bytes, chosen.rank, peak.phase, peak.where),
        ledger=peak.ledger,
        allocated_bytes=_allocated(predictor, chosen),
        step=chosen.step,
        micro_batches=micro_batches(strategy, layout, recipe.batch_size),
        candidates=judged(predictor, chosen),
        reasons=(*reasons(predictor, chosen), *scaling.sentences(recipe)),
        assumptions=(*assumptions(cluster, predictor.reserve), *emulated(strategy, cluster.device)),
        timeline=tuple(TimelinePoint(s.phase, s.ledger) for s in chosen.run.timeline),
        host=HostMemory(chosen.host, cluster.host_capacity_bytes),
        disk=DiskSpace(chosen.disk_bytes),
        layout=layout,
        devices_per_node=cluster.devices_per_node,
        pipeline=chosen.timetable,
    )


def _allocated(predictor: Predictor, chosen: Prediction) -> dict[int, int]:
    """Predicted peak by rank, as the run measures it; of ranks with equal memory, the first."""
    recipe, blueprint, cluster = predictor.recipe, predictor.blueprint, predictor.cluster
    predicted = {chosen.rank: chosen.allocated_bytes, **chosen.allocated_by_rank}
    if not chosen.run.even and cluster.world_size <= EVERY_RANK:
        for rank in set(range(cluster.world_size)) - predicted.keys():
            run = predict(recipe, blueprint, chosen.strategy, cluster, rank=rank)
            predicted[rank] = run.allocated_bytes
    return predicted
