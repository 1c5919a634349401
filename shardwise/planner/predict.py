"""The prediction of one rank: the counts of a dry run, the allocator's fragmentation, the profile's overhead, the time.

Fragmentation is what the replayed allocator reserves (dryrun/replay.py) beyond the tensors and workspaces at the
peak. It is the unlimited replay's where that stays within the budget. Where it does not though the sum does, the trace
is replayed under the budget: freed segments then go back to the driver, and either all allocations find room or one
fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from shardwise.core.cost import StepCost
from shardwise.core.ledger import Ledger, Peak
from shardwise.core.plan import StepEstimate, moment
from shardwise.core.strategy import Layout, Strategy
from shardwise.core.timetable import Timetable
from shardwise.core.units import format_bytes
from shardwise.dryrun.model_flops import model_flops
from shardwise.dryrun.replay import Replay
from shardwise.dryrun.run import WHOLE_STEP, DryRun, dry_run, place_of
from shardwise.hardware.allocator_options import VARIABLES, AllocatorOptions, options_in
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint, batch_shapes
from shardwise.planner.phase_times import phase_seconds
from shardwise.planner.timing import mfu, predicted_step_time
from shardwise.recipe.sections import Recipe
from shardwise.technique import layout_of, micro_batches
from shardwise.technique.place import Place

EXPANDABLE = AllocatorOptions(expandable_segments=True)


@dataclass(frozen=True)
class Prediction:
    """What one rank of one strategy will hold and do.

    Attributes:
        peak: with overhead and fragmentation: what the device must have.
        allocated_bytes: tensors and workspaces, as the measurement counts them.
        host: what the rank holds in host memory, where that is another than the device's.
        disk_bytes: what it holds on a disk.
        whole: whether the whole step was run, and its allocations replayed.
        limited: the replay under the budget, where the unlimited one does not stay within it.
        expanded: the same with expandable segments, where it fails without them.
        peaks: by phase, without overhead and fragmentation.
        timetable: what the report draws a step of all ranks from, where they hold different blocks.
        allocated_by_rank: ``allocated_bytes`` of all ranks that were looked at, where that was more than one.
    """

    strategy: Strategy
    layout: Layout
    rank: int
    peak: Peak
    allocated_bytes: int
    host: Ledger
    disk_bytes: int
    cost: StepCost
    step: StepEstimate
    parameters: int
    run: DryRun
    whole: bool
    limited: Replay | None = None
    expanded: Replay | None = None
    allocated_by_rank: Mapping[int, int] = field(default_factory=dict)
    timetable: Timetable | None = None
    peaks: Mapping[str, Peak] = field(default_factory=dict)

    @property
    def sum_bytes(self) -> int:
        """What the device must have were there no fragmentation."""
        return self.peak.bytes - self.peak.ledger.fragmentation

    @property
    def retries(self) -> int:
        """Times in a step that the allocator empties its cache to make room."""
        return self.limited.retries if self.limited is not None and self.limited.failure is None else 0

    def in_words(self) -> str:
        """What the limited replay met; "" where there was no need of one."""
        if self.limited is None:
            return ""
        failure = self.limited.failure
        if failure is None:
            times = "once" if self.retries == 1 else f"{self.retries} times"
            return f"the allocator empties its cache {times} a step to make room" if self.retries else ""
        helps = self.expanded is not None and self.expanded.failure is None
        return (
            f"out of memory by fragmentation {moment(failure.phase, failure.where)}: {format_bytes(failure.size)}"
            f" find no room, with {format_bytes(failure.reserved)} reserved and"
            f" {format_bytes(failure.allocated)} of it in use"
            + (f"; with {VARIABLES[0]}={EXPANDABLE.described()} it would fit" if helps else "")
        )


def predict(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    cluster: Cluster,
    *,
    rank: int = 0,
    budget: int | None = None,
    whole: bool = True,
) -> Prediction:
    """Dry-run ``rank`` and say what it needs.

    Args:
        budget: bytes of the device that may be used; its capacity when not given.
        whole: whether to run the whole step, and to replay the allocator. Otherwise fewer micro-batches are run where
            the peaks of all follow from them (``Place.shortcut``).
    """
    if whole:
        run = dry_run(recipe, blueprint, strategy, cluster, rank=rank)
    else:
        run = _shortened_run(recipe, blueprint, strategy, cluster, rank)
    cost, layout, dtype = run.cost, layout_of(strategy, cluster.world_size), run.compute_dtype
    worst = max(run.peaks.values(), key=lambda peak: peak.bytes)
    overhead = cluster.device.overhead
    seen, unseen = overhead.workspace_bytes, overhead.outside_allocator(run.communicators)
    room = (cluster.capacity_bytes if budget is None else budget) - unseen
    reserved, limited, expanded = _reserves(run, worst.bytes + seen, room, options_in(cluster.device.kind))
    fragmentation = max(0, reserved - worst.bytes - seen)
    time = predicted_step_time(cost, layout, cluster)
    useful = model_flops(blueprint, recipe.data, recipe.batch_size, dtype, cluster.device.kind)
    estimate = StepEstimate(
        seconds=time.seconds,
        tokens=recipe.batch_size * (1 if blueprint.dataset is not None else _labels(recipe, blueprint)),
        flops=cost.flops,
        traffic_bytes=cost.traffic_by_axis(),
        model_flops=useful,
        mfu=mfu(useful, time.seconds, dtype, cluster),
        split=time.split,
        phases=phase_seconds(cost, time, cluster),
        unit="tokens" if blueprint.dataset is None else "samples",
        counted=blueprint.minimises.counted,
    )
    return Prediction(
        strategy=strategy,
        layout=layout,
        rank=rank,
        peak=replace(worst, ledger=worst.ledger.plus(fragmentation=fragmentation, overhead=seen + unseen)),
        # Blocks, with what rounding adds, where there is an allocator to hand them out.
        allocated_bytes=run.replay.allocated if run.replay else worst.bytes + seen,
        host=run.host,
        disk_bytes=run.disk_bytes,
        cost=cost,
        step=estimate,
        parameters=run.parameters,
        run=run,
        whole=whole,
        limited=limited,
        expanded=expanded,
        peaks=run.peaks,
    )


def _reserves(
    run: DryRun, needed: int, room: int, options: AllocatorOptions
) -> tuple[int, Replay | None, Replay | None]:
    """(bytes that the allocator reserves, its replay within ``room``, the same with expandable segments).

    The replays are None where they are not needed: where the tensors do not fit, or where they fit with fragmentation.
    """
    if run.trace is None or run.replay is None:
        return 0, None, None
    reserved = run.replay.reserved
    if not needed <= room < reserved:
        return reserved, None, None
    limited = run.trace.replayed(options, limit=room)
    if limited.failure is None:
        return limited.reserved, limited, None
    expanded = None if options.expandable_segments else run.trace.replayed(EXPANDABLE, limit=room)
    return reserved, limited, expanded


def _labels(recipe: Recipe, blueprint: Blueprint) -> int:
    """Targets of one sample, of all its rows: the elements of its labels."""
    shapes = batch_shapes(blueprint, recipe.data)
    labels = next((shape for name, (shape, _) in shapes.items() if name in ("labels", "label")), ())
    return math.prod(labels)


def _shortened_run(
    recipe: Recipe, blueprint: Blueprint, strategy: Strategy, cluster: Cluster, rank: int
) -> DryRun:
    """A dry run of as few micro-batches as the peaks of all follow from."""
    pipeline = place_of(recipe, blueprint, strategy, cluster, rank)
    count = micro_batches(strategy, layout_of(strategy, cluster.world_size), recipe.batch_size)
    run = partial(dry_run, recipe, blueprint, strategy, cluster, rank=rank, history=False)
    return _with_peaks_of_all(run, pipeline, count)


def _with_peaks_of_all(run: Callable[..., DryRun], pipeline: Place | None, count: int) -> DryRun:
    if pipeline is None or (shortcut := pipeline.shortcut(count)) is None:
        return run(reduced=WHOLE_STEP)
    more, fewer = run(reduced=shortcut.more), run(reduced=shortcut.fewer)
    phases = {peak.phase for peak in more.pass_peaks}
    pairs = list(zip(fewer.pass_peaks, more.pass_peaks, strict=True))
    pairs += [(fewer.peaks[phase], peak) for phase, peak in more.peaks.items() if phase not in phases]
    peaks: dict[str, Peak] = {}
    for one, two in pairs:
        peak = Peak(one.ledger.extrapolated(two.ledger, shortcut.times), two.phase, two.where)
        if peak.phase not in peaks or peak.bytes > peaks[peak.phase].bytes:
            peaks[peak.phase] = peak
    return replace(more, peaks=peaks, place=pipeline.without_groups())
