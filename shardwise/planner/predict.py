"""Predictions of one strategy: the dry run's counts, the allocator's fragmentation, the profile's overhead, the time.

A quick prediction dry-runs two shallow models that differ by one block and adds the difference as often as
the model has blocks more; it ranks strategies. Where blocks are not treated alike but in a repeating pattern,
the two differ by one repetition of it; where the pattern depends on the depth, only the whole model will do. A full
prediction dry-runs the whole model; its figure is shown. The two agree to the byte when the peak is at the
same place of every depth. Where it does not yet (a loss that outweighs two blocks but not eighty), the shallow
models are made deeper until it does.

Fragmentation is what the replayed allocator reserves (dryrun/replay.py) beyond the tensors and workspaces at the
peak. It is the unlimited replay's where that stays within the budget. Where it does not though the sum does, a full
prediction replays under the budget: freed segments then go back to the driver, and either all allocations find
room or one fails. A quick prediction has none: segments come in steps, so two shallow models say nothing of a deep
one's (extrapolated, neighbours of Llama-3-8B were off by up to 9 GiB). The search lets a full dry run decide
wherever the sum leaves room.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

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
from shardwise.model.blueprint import Blueprint
from shardwise.planner.compose import CountComposer
from shardwise.planner.compose_align import NotComposable
from shardwise.planner.phase_times import phase_seconds
from shardwise.planner.read_ahead import ReadAhead
from shardwise.planner.timing import mfu, predicted_step_time
from shardwise.recipe.sections import Recipe
from shardwise.technique import has_stages, layout_of, micro_batches
from shardwise.technique.place import Place, Reduced
from shardwise.technique.site import PlanHints

REDUCED_DEPTH = 4
"""Blocks of the shallower model: prefetching needs a neighbour, and the first and last blocks differ from the others.
Where weights are sharded and blocks recomputed, a model of 12 extrapolated from 2 and 3 had 67 % too much, and from 4
and 5 its own memory. Models of up to REDUCED_DEPTH + 2 run whole."""

EXPANDABLE = AllocatorOptions(expandable_segments=True)


@dataclass(frozen=True)
class Prediction:
    """What one rank of one strategy will hold and do.

    Attributes:
        peak: with overhead and fragmentation: what the device must have.
        allocated_bytes: tensors and workspaces, as the measurement counts them.
        host: what the rank holds in host memory, where that is another than the device's.
        disk_bytes: what it holds on a disk.
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
    quick: bool = False,
    budget: int | None = None,
    composer: CountComposer | None = None,
) -> Prediction:
    """Dry-run ``rank`` and say what it needs.

    Args:
        quick: extrapolate over identical blocks where that can be done.
        composer: composes quick predictions where it can.
        budget: bytes of the device that may be used; its capacity when not given.
    """
    arguments = (recipe, blueprint, strategy, cluster, rank)
    counts = _quick(*arguments, composer) if quick else _full(*arguments)
    cost, run = counts.cost, counts.run
    layout = layout_of(strategy, cluster.world_size)
    worst = max(counts.peaks.values(), key=lambda peak: peak.bytes)
    overhead = cluster.device.overhead
    seen, unseen = overhead.workspace_bytes, overhead.outside_allocator(run.communicators)
    room = (cluster.capacity_bytes if budget is None else budget) - unseen
    reserved, limited, expanded = _reserves(counts, worst.bytes + seen, room, options_in(cluster.device.kind))
    fragmentation = max(0, reserved - worst.bytes - seen)
    time = predicted_step_time(cost, layout, cluster)
    dtype = run.compute_dtype
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
    )
    return Prediction(
        strategy=strategy,
        layout=layout,
        rank=rank,
        peak=replace(worst, ledger=worst.ledger.plus(fragmentation=fragmentation, overhead=seen + unseen)),
        # Blocks, with what rounding adds, where there is an allocator to hand them out.
        allocated_bytes=run.replay.allocated if run.replay else worst.bytes + seen,
        host=counts.host,
        disk_bytes=counts.disk_bytes,
        cost=cost,
        step=estimate,
        parameters=counts.parameters,
        run=run,
        whole=counts.whole,
        limited=limited,
        expanded=expanded,
        peaks=counts.peaks,
    )


def _reserves(
    counts: _Counts, needed: int, room: int, options: AllocatorOptions
) -> tuple[int, Replay | None, Replay | None]:
    """(bytes that the allocator reserves, its replay within ``room``, the same with expandable segments).

    The replays are None where they are not needed: where the tensors do not fit, or where they fit with fragmentation.
    """
    trace, reserved = counts.run.trace, counts.reserved
    if trace is None or not needed <= room < reserved:
        return reserved, None, None
    limited = trace.replayed(options, limit=room)
    if limited.failure is None:
        return limited.reserved, limited, None
    expanded = None if options.expandable_segments else trace.replayed(EXPANDABLE, limit=room)
    return reserved, limited, expanded


def _labels(recipe: Recipe, blueprint: Blueprint) -> int:
    """Targets of one sample: the elements of its labels."""
    shapes = blueprint.sample_shapes(recipe.data.sequence_length)
    labels = next((shape for name, (shape, _) in shapes.items() if name in ("labels", "label")), ())
    return math.prod(labels)


@dataclass(frozen=True)
class _Counts:
    """Counted memory; ``reserved`` is 0 without a caching allocator or without a replay."""

    peaks: Mapping[str, Peak]
    host: Ledger
    disk_bytes: int
    reserved: int
    cost: StepCost
    parameters: int
    run: DryRun
    whole: bool


def _composed(
    composer: CountComposer, strategy: Strategy, recipe: Recipe, cluster: Cluster, rank: int
) -> _Counts | None:
    """The counts as they follow from dry runs of other strategies; None where they do not."""
    layout = layout_of(strategy, cluster.world_size)
    if has_stages(layout):
        return None
    try:
        composed = composer.composed(strategy, micro_batches(strategy, layout, recipe.batch_size))
    except NotComposable:
        return None
    peaks = {composed.peak.phase: composed.peak}
    run = DryRun(
        rank,
        peaks,
        composed.cost,
        (),
        composed.parameters,
        composed.even,
        composed.compute_dtype,
        hints=PlanHints(notes=list(composed.notes)),
        host=composed.host,
        disk_bytes=composed.disk_bytes,
        communicators=composed.communicators,
    )
    return _Counts(
        peaks, composed.host, composed.disk_bytes, 0, composed.cost, composed.parameters, run, whole=False
    )


def _full(recipe: Recipe, blueprint: Blueprint, strategy: Strategy, cluster: Cluster, rank: int) -> _Counts:
    run = dry_run(recipe, blueprint, strategy, cluster, rank=rank)
    reserved = run.replay.reserved if run.replay is not None else 0
    return _Counts(run.peaks, run.host, run.disk_bytes, reserved, run.cost, run.parameters, run, whole=True)


def _quick(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    cluster: Cluster,
    rank: int,
    composer: CountComposer | None,
) -> _Counts:
    if composer is not None and (counts := _composed(composer, strategy, recipe, cluster, rank)) is not None:
        return counts
    layout = layout_of(strategy, cluster.world_size)
    count = micro_batches(strategy, layout, recipe.batch_size)
    depth = blueprint.depth

    def run(blocks: int | None, reduced: Reduced = WHOLE_STEP) -> DryRun:
        return dry_run(
            recipe, blueprint, strategy, cluster, rank=rank, depth=blocks, reduced=reduced, history=False
        )

    place = None
    if depth is not None and has_stages(layout):
        place = place_of(recipe, blueprint, strategy, cluster, rank)
        depth = depth if place is None else place.depth
    if depth is not None:
        pair = _pair_to_extrapolate(lambda blocks: _whole_step(partial(run, blocks), place, count), depth)
        if pair is not None:
            return _extrapolated(pair.fewer, pair.more, (depth - pair.blocks) // pair.period)
    if place is None or place.shortcut(count) is None:
        return _full(recipe, blueprint, strategy, cluster, rank)
    few = _whole_step(partial(run, None), place, count)
    return _Counts(few.peaks, few.host, few.disk_bytes, 0, few.cost, few.parameters, few, whole=False)


class _ShallowPair(NamedTuple):
    """Dry runs with ``blocks`` blocks, and with ``period`` blocks more."""

    fewer: DryRun
    more: DryRun
    blocks: int
    period: int


def _pair_to_extrapolate(run: Callable[[int], DryRun], depth: int) -> _ShallowPair | None:
    """Two shallow dry runs whose difference is that of all further blocks: their peaks are in the same place.

    Techniques treat blocks in periods, such as every second one. Only a dry run says the period, so the second run
    starts ahead with the period of the run before, 1 at first.
    """
    blocks, period = REDUCED_DEPTH, 1
    while depth > blocks + 1 + period:
        with ReadAhead(run, (blocks, blocks + period)) as ahead:
            fewer, guess = ahead.get(0), period
            period = fewer.hints.repeat_every
            if period == 0:  # a technique's treatment of a block depends on the whole depth
                return None
            least = max(blocks, REDUCED_DEPTH * period, fewer.hints.min_depth)
            least += (depth - least) % period  # so that whole periods remain
            if least > blocks:
                blocks = least
                continue
            more = ahead.get(1) if period == guess else run(blocks + period)
        if _same_place(fewer, blocks, more, blocks + period):
            return _ShallowPair(fewer, more, blocks, period)
        blocks *= 2  # the peak is still in a place of its own, such as the head
    return None


def _whole_step(run: Callable[..., DryRun], place: Place | None, count: int) -> DryRun:
    """A dry run of a whole step, or two reduced ones where its peaks can be extrapolated from them."""
    if place is None or (shortcut := place.shortcut(count)) is None:
        return run()
    more, fewer = run(shortcut.more), run(shortcut.fewer)
    phases = {peak.phase for peak in more.pass_peaks}
    pairs = list(zip(fewer.pass_peaks, more.pass_peaks, strict=True))
    pairs += [(fewer.peaks[phase], peak) for phase, peak in more.peaks.items() if phase not in phases]
    peaks: dict[str, Peak] = {}
    for one, two in pairs:
        peak = Peak(one.ledger.extrapolated(two.ledger, shortcut.times), two.phase, two.where)
        if peak.phase not in peaks or peak.bytes > peaks[peak.phase].bytes:
            peaks[peak.phase] = peak
    return replace(more, peaks=peaks, place=place.without_groups())


def _extrapolated(first: DryRun, second: DryRun, times: int) -> _Counts:
    """What ``first`` holds and does, and ``times`` what ``second`` does more."""
    peaks = {
        phase: Peak(peak.ledger.extrapolated(second.peaks[phase].ledger, times), phase, peak.where)
        for phase, peak in first.peaks.items()
    }
    parameters = first.parameters + times * (second.parameters - first.parameters)
    host, cost = first.host.extrapolated(second.host, times), first.cost.extrapolated(second.cost, times)
    on_disk = first.disk_bytes + times * (second.disk_bytes - first.disk_bytes)
    return _Counts(peaks, host, on_disk, 0, cost, parameters, first, whole=False)


def _same_place(first: DryRun, depth: int, second: DryRun, deeper: int) -> bool:
    """Whether both peaks lie in one phase and one module, blocks numbered from the first or from the last."""
    here, there = first.peak, second.peak
    same = here.where == there.where or _from_last(here, depth) == _from_last(there, deeper)
    return here.phase == there.phase and same


def _from_last(peak: Peak, depth: int) -> str:
    """The module of a peak, with its block numbered from the last, which is -1."""
    return re.sub(r"(?<=\.)\d+", lambda match: str(int(match[0]) - depth), peak.where, count=1)
