"""Predictions of one strategy: the dry run's counts, the profile's overhead, the time.

A quick prediction dry-runs two shallow models that differ by one block and adds the difference as often as
the model has blocks more; it ranks strategies. A full prediction dry-runs the whole model; it is what is shown.
The two agree to the byte for identical blocks.
"""

from __future__ import annotations

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
    depth = blueprint.depth
    if quick and depth is not None and depth > SHALLOW + 2:
        shallow = dry_run(recipe, blueprint, strategy, cluster, rank=rank, depth=SHALLOW)
        deeper = dry_run(recipe, blueprint, strategy, cluster, rank=rank, depth=SHALLOW + 1)
        blocks = depth - SHALLOW
        peaks = _extrapolated_peaks(shallow.peaks, deeper.peaks, blocks)
        cost = shallow.cost.extrapolated(deeper.cost, blocks)
        parameters = shallow.parameters + blocks * (deeper.parameters - shallow.parameters)
        run = shallow
    else:
        run = dry_run(recipe, blueprint, strategy, cluster, rank=rank)
        peaks, cost, parameters = run.peaks, run.cost, run.parameters
    layout = layout_of(strategy, cluster.world_size)
    worst = max(peaks.values(), key=lambda peak: peak.bytes)
    overhead = cluster.device.overhead
    groups = len({c.axis for c in cost.collectives if c.degree > 1})
    seen = overhead.workspace_bytes
    unseen = overhead.outside_allocator(groups)
    time = step_time(cost, layout, cluster)
    estimate = StepEstimate(
        seconds=time.seconds,
        tokens=recipe.batch_size * recipe.data.sequence_length,
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


def _extrapolated_peaks(
    shallow: Mapping[str, Peak], deeper: Mapping[str, Peak], blocks: int
) -> dict[str, Peak]:
    return {
        phase: Peak(peak.ledger.extrapolated(deeper[phase].ledger, blocks), phase, peak.where)
        for phase, peak in shallow.items()
    }
