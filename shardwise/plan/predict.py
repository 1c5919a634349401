"""Predictions of one strategy: the dry run's counts, the profile's overhead, the time.

A quick prediction dry-runs two shallow models that differ by one block and adds the difference as often as
the model has blocks more; it ranks strategies. Where blocks are not treated alike but in a repeating pattern,
the two differ by one period of it; where the pattern depends on the depth, only the whole model will do. A full
prediction dry-runs the whole model; it is what is shown. The two agree to the byte when the peak lies at the
same place of every depth. Where it does not yet (a loss that outweighs two blocks but not eighty), the shallow
models are made deeper until it does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.cluster import Cluster
from shardwise.core.cost import StepCost
from shardwise.core.ledger import Peak
from shardwise.core.plan import StepEstimate
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Layout, Strategy
from shardwise.dryrun.run import DryRun, dry_run
from shardwise.model.blueprint import Blueprint
from shardwise.plan.timing import mfu, step_time
from shardwise.technique import layout_of

SHALLOW = 2
"""Blocks of the shallower model: prefetching needs a neighbour. Models of up to SHALLOW + 2 run whole."""


@dataclass(frozen=True)
class Prediction:
    """What one rank of one strategy will hold and do."""

    strategy: Strategy
    layout: Layout
    rank: int
    peak: Peak
    allocated_bytes: int
    cost: StepCost
    step: StepEstimate
    parameters: int
    run: DryRun


def predict(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    cluster: Cluster,
    *,
    rank: int = 0,
    quick: bool = False,
) -> Prediction:
    """Dry-run ``rank`` and say what it needs. ``quick`` extrapolates over identical blocks where it can."""
    peaks, cost, parameters, run = (_quick if quick else _full)(recipe, blueprint, strategy, cluster, rank)
    layout = layout_of(strategy, cluster.world_size)
    worst = max(peaks.values(), key=lambda peak: peak.bytes)
    overhead = cluster.device.overhead
    groups = len({c.axis for c in cost.collectives if c.degree > 1})
    seen = overhead.workspace_bytes
    unseen = overhead.outside_allocator(groups)
    time = step_time(cost, layout, cluster)
    estimate = StepEstimate(
        seconds=time.seconds,
        tokens=recipe.batch_size * _targets(recipe, blueprint),
        flops=cost.flops,
        traffic_bytes=cost.traffic_by_axis(),
        mfu=mfu(cost, time.seconds, run.compute_dtype, cluster),
        split=time.split,
    )
    return Prediction(
        strategy=strategy,
        layout=layout,
        rank=rank,
        peak=Peak(worst.ledger.plus(overhead=seen + unseen), worst.phase, worst.where),
        allocated_bytes=worst.bytes + seen,
        cost=cost,
        step=estimate,
        parameters=parameters,
        run=run,
    )


def _targets(recipe: Recipe, blueprint: Blueprint) -> int:
    """Targets of one sample: the elements of its labels."""
    shapes = blueprint.sample_shapes(recipe.data.sequence_length)
    labels = next((shape for name, (shape, _) in shapes.items() if name in ("labels", "label")), ())
    return math.prod(labels)


Counts = tuple[Mapping[str, Peak], StepCost, int, DryRun]


def _full(recipe: Recipe, blueprint: Blueprint, strategy: Strategy, cluster: Cluster, rank: int) -> Counts:
    run = dry_run(recipe, blueprint, strategy, cluster, rank=rank)
    return run.peaks, run.cost, run.parameters, run


def _quick(recipe: Recipe, blueprint: Blueprint, strategy: Strategy, cluster: Cluster, rank: int) -> Counts:
    depth, shallow, period = blueprint.depth, SHALLOW, 1
    while depth is not None and period and depth > shallow + 1 + period:
        # Deep enough that whole periods are missing from the model's own depth.
        first = dry_run(recipe, blueprint, strategy, cluster, rank=rank, depth=shallow)
        if period != first.period or (depth - shallow) % period:
            period = first.period
            shallow += (depth - shallow) % period if period else 0
            continue
        second = dry_run(recipe, blueprint, strategy, cluster, rank=rank, depth=shallow + period)
        if _place(first, shallow) == _place(second, shallow + period):
            return _extrapolated(first, second, (depth - shallow) // period)
        shallow *= 2
    return _full(recipe, blueprint, strategy, cluster, rank)


def _extrapolated(first: DryRun, second: DryRun, times: int) -> Counts:
    """What ``first`` holds and does, and ``times`` what ``second`` does more."""
    peaks = {
        phase: Peak(peak.ledger.extrapolated(second.peaks[phase].ledger, times), phase, peak.where)
        for phase, peak in first.peaks.items()
    }
    parameters = first.parameters + times * (second.parameters - first.parameters)
    return peaks, first.cost.extrapolated(second.cost, times), parameters, first


def _place(run: DryRun, depth: int) -> tuple[str, str]:
    """Phase and module of the peak, blocks numbered from the last."""
    where = re.sub(r"(?<=\.)\d+", lambda match: str(int(match[0]) - depth), run.peak.where, count=1)
    return run.peak.phase, where
