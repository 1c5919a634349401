"""Planning: a strategy is chosen (planner/choose.py), compared with its neighbours, and written as a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwise.core.collector import frozen
from shardwise.core.plan import DiskSpace, HostMemory, Plan, PlannedPeak, TimelinePoint
from shardwise.core.progress import Progress, silent
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint
from shardwise.planner.choose import choose_strategy
from shardwise.planner.compare import compared_candidates, estimate_neighbours
from shardwise.planner.explain import assumptions, once_in_words, reasons
from shardwise.planner.predict import Prediction, predict
from shardwise.planner.predictor import Predictor
from shardwise.planner.ranks import EVERY_RANK
from shardwise.recipe import lr_scaling as scaling
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    digits_of,
    emulated,
    micro_batches,
    refuse_broken,
    refuse_unsupported,
    strategy_line,
)


def plan_for(
    recipe: Recipe,
    blueprint: Blueprint,
    cluster: Cluster,
    *,
    compare: bool = True,
    progress: Progress = silent,
    answered: Callable[[Plan], None] = lambda plan: None,
) -> Plan:
    """Check the settings that the recipe pins and choose the others.

    Args:
        compare: also predict what one change of the chosen strategy would cost. This takes most of the time.
        progress: called with a line now and then.
        answered: called with the plan before what it is compared with is estimated.

    Raises:
        RecipeError: when pinned settings break a rule.
    """
    refuse_broken(recipe, cluster.world_size, lambda key: f"strategy.{key}")
    refuse_unsupported(recipe.strategy, cluster.device, lambda key: f"strategy.{key}")
    predictor = Predictor(recipe, blueprint, cluster, progress=progress)
    with frozen():
        chosen = choose_strategy(predictor)
        plan = _written_plan(predictor, chosen)
        if compare:
            answered(plan)
            estimate_neighbours(predictor, chosen)
            plan = replace(
                plan,
                candidates=compared_candidates(predictor, chosen),
                reasons=tuple(_reasons(predictor, chosen)),
            )
        return plan


def _written_plan(predictor: Predictor, chosen: Prediction) -> Plan:
    """The plan of the chosen strategy."""
    recipe, cluster = predictor.recipe, predictor.cluster
    layout, strategy, peak = chosen.layout, chosen.strategy, chosen.peak
    return Plan(
        strategy=strategy,
        line=strategy_line(strategy, layout, recipe.batch_size),
        world_size=cluster.world_size,
        cluster=cluster.name,
        device=cluster.device.name,
        capacity_bytes=cluster.capacity_bytes,
        reserve_bytes=predictor.verdicts.reserve_bytes,
        parameters=chosen.parameters,
        peak=PlannedPeak(peak.bytes, chosen.rank, peak.phase, peak.where),
        ledger=peak.ledger,
        allocated_bytes=_allocated_by_rank(predictor, chosen),
        step=chosen.step,
        micro_batches=micro_batches(strategy, layout, recipe.batch_size),
        candidates=compared_candidates(predictor, chosen),
        reasons=tuple(_reasons(predictor, chosen)),
        assumptions=(
            *assumptions(cluster, cluster.device.traits.reserve),
            *once_in_words(strategy),
            *emulated(strategy, cluster.device),
        ),
        timeline=tuple(TimelinePoint(s.phase, s.ledger) for s in chosen.run.timeline),
        host=HostMemory(chosen.host, cluster.host_capacity_bytes),
        disk=DiskSpace(chosen.disk_bytes),
        layout=layout,
        devices_per_node=cluster.devices_per_node,
        pipeline=chosen.timetable,
        sites=chosen.run.sites,
        blocks=chosen.run.blocks,
        trained_parameters=predictor.blueprint.parameter_counts()[0],
        departures=predictor.blueprint.departures(digits_of(strategy).compute),
    )


def _reasons(predictor: Predictor, chosen: Prediction) -> Iterator[str]:
    yield from reasons(predictor, chosen)
    yield from scaling.scaling_sentences(predictor.recipe)


def _allocated_by_rank(predictor: Predictor, chosen: Prediction) -> dict[int, int]:
    """Predicted peak by rank, as the run measures it; of ranks with equal memory, the first."""
    recipe, blueprint, cluster = predictor.recipe, predictor.blueprint, predictor.cluster
    predicted = {chosen.rank: chosen.allocated_bytes, **chosen.allocated_by_rank}
    if not chosen.run.even and cluster.world_size <= EVERY_RANK:
        for rank in set(range(cluster.world_size)) - predicted.keys():
            run = predict(recipe, blueprint, chosen.strategy, cluster, rank=rank)
            predicted[rank] = run.allocated_bytes
    return predicted
