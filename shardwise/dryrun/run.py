"""The dry run: the trainer's own build and step on fake tensors, as one rank of a world of any size.

One step is enough: the optimizer's state exists from the start, so every step is like the first. Of many equal
micro-batches only the first, one from the middle and the last are run, in a pipeline as many as fill it: the peak does
not depend on how many more there are, and the cost of one is counted and multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.core.allocator_options import options_in
from shardwise.core.cluster import Cluster
from shardwise.core.cost import StepCost
from shardwise.core.ledger import Ledger, Peak
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Strategy
from shardwise.dryrun.counting import dtype_name
from shardwise.dryrun.modules import RunningModule
from shardwise.dryrun.reading import Sample, ledger_at, peaks, timeline
from shardwise.dryrun.replay import Replay, Trace
from shardwise.dryrun.tally import Tally
from shardwise.dryrun.target import TARGETS, Target
from shardwise.dryrun.tracker import Tracker, axis_names
from shardwise.dryrun.world import fake_world
from shardwise.engine.build import Run, assemble, materialise
from shardwise.engine.optim.norm import holders, local
from shardwise.engine.phase import current_micro_batch, listening
from shardwise.engine.schedule import learning_rate
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch, Blueprint, batch_shapes
from shardwise.model.host import memories_apart
from shardwise.model.lora import weights_in
from shardwise.technique import MICRO_BATCH_SIZE, layout_of, micro_batches
from shardwise.technique.base import Pipeline, Site


@dataclass(frozen=True)
class DryRun:
    """What one rank of one strategy holds and does in one optimizer step.

    Attributes:
        peaks: the highest instant of every phase, without the profile's overhead.
        cost: kernels and collectives of the whole step, all micro-batches included.
        timeline: the ledger over the step.
        parameters: elements of the whole model, unsharded.
        even: whether every rank holds equally much of every parameter.
        compute_dtype: what matrix products run in, as the device profiles call it.
        trace: what was allocated and freed; None where the target's allocator caches nothing.
        replay: what that allocator reserves for it when nothing limits it.
        notes: what the techniques have to say about what they did.
        period: after how many blocks what a block holds and costs repeats itself; 0 where that depends on depth.
        shallowest: the fewest blocks of a model from which deeper ones can be extrapolated.
        depth: blocks of the whole model, of a pipeline those of each of this rank's stages; None where that varies.
        pipeline: this rank's place in a pipeline, if there is one.
        pass_bytes: of a pipeline, activations that the first micro-batch's forward pass leaves for its backward pass.
        host: what this rank holds in host memory when that is most, where it is another memory than the device's.
        disk_bytes: what this rank reserves on a disk.
        communicators: process groups of several ranks that it sends or receives in, that of all ranks among them.
    """

    rank: int
    peaks: dict[str, Peak]
    cost: StepCost
    timeline: tuple[Sample, ...]
    parameters: int
    even: bool
    compute_dtype: str
    trace: Trace | None = None
    replay: Replay | None = None
    notes: tuple[str, ...] = ()
    period: int = 1
    host: Ledger = field(default_factory=Ledger)
    disk_bytes: int = 0
    communicators: int = 0
    shallowest: int = 1
    depth: int | None = None
    pipeline: Pipeline | None = None
    pass_bytes: int = 0

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.bytes)


def dry_run(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    cluster: Cluster,
    *,
    rank: int = 0,
    depth: int | None = None,
    seen: int | None = None,
    after: int | None = None,
    history: bool = True,
) -> DryRun:
    """Run one optimizer step as ``rank`` without allocating anything.

    Args:
        depth: number of blocks instead of the model's own.
        seen: at most how many micro-batches to run, at least 3 of more; as many as hold what all do when not given.
        after: of a pipeline, how many ranks the schedule has after this one, where fewer than there are.
        history: whether to read off the timeline, and to replay what was allocated.
    """
    world_size = cluster.world_size
    count = micro_batches(strategy, layout_of(strategy, world_size), recipe.batch_size)
    target = TARGETS[cluster.device.kind]
    with fake_world(rank, world_size), memories_apart(not target.is_host):
        site = assemble(recipe, blueprint, strategy, world_size, "cpu", depth)
        _shorten(site, after)
        elements, even = weights_in(site.model), _even(site)
        modules = RunningModule(site.model)
        tracker = _tracker(site, target, modules)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.random.fork_rng(devices=[]), fake, tracker.watching(), target.kernels(), modules:
            run = materialise(site, recipe, blueprint, torch.device("cpu"))
            _tag_state(run, tracker)
            snapshots: Snapshots[None] | None = snapshots_of(run)
            if snapshots is not None:
                tracker.tag(snapshots.buffers, "overhead")
            batches = _fake_batches(run, strategy, recipe, count, tracker)
            start = tracker.now
            shown, entries = _counted_step(run, batches, tracker, seen)
        trace = _trace(tracker, start, cluster) if history and target.caches else None
    return DryRun(
        rank,
        peaks(tracker, since=start),
        _whole_cost(tracker.tallies, shown, count),
        tuple(timeline(tracker, since=start)) if history else (),
        elements,
        even,
        dtype_name(run.dtypes.compute),
        trace=trace,
        replay=trace.replayed(options_in(cluster.device.kind)) if trace is not None else None,
        notes=tuple(site.notes),
        period=site.period,
        host=max(peaks(tracker, start, on_host=True).values(), key=lambda peak: peak.bytes).ledger,
        disk_bytes=tracker.disk_bytes,
        communicators=len(tracker.groups),
        shallowest=site.shallowest,
        depth=blueprint.depth if site.pipeline is None else site.pipeline.depth,
        pipeline=site.pipeline,
        pass_bytes=_pass_bytes(tracker, entries) if site.pipeline is not None and history else 0,
    )


def _tracker(site: Site, target: Target, modules: RunningModule) -> Tracker:
    """One that knows the mesh axis of every group."""
    groups = {name: site.mesh.get_group(name) for name in site.mesh.mesh_dim_names or ()}
    groups |= {name: mesh.get_group() for name, mesh in site.joined_axes.items()}
    channels = {} if site.pipeline is None else site.pipeline.channels
    axes = axis_names(groups) | {group.group_name: "pipeline" for group in channels.values()}
    tracker = Tracker(axes, target.workspace, target.kept, modules.name)
    if site.layout.world_size > 1:
        # The trainer asks all ranks together: whether to stop, say.
        tracker.groups.add(dist.distributed_c10d._get_default_group().group_name)
    return tracker


def _even(site: Site) -> bool:
    """Whether every rank of this one's stage holds equally much of every parameter."""
    ranks = site.layout.world_size // site.layout.degree("pipeline")
    return all(p.numel() == _held_by_all(p, ranks) for p in site.model.parameters())


def _shorten(site: Site, after: int | None) -> None:
    """Leave out what a pipeline has beyond so many ranks after this one."""
    if site.pipeline is not None and after is not None:
        site.pipeline = site.pipeline.shorter(after)


def _trace(tracker: Tracker, start: int, cluster: Cluster) -> Trace:
    """What the allocator is asked for: tensors, and the workspace of each of the two threads' products."""
    workspace = cluster.device.overhead.workspace_bytes // 2
    on_device = (replace(a) for a in tracker.allocations if not a.on_host)
    return Trace(tuple(on_device), start, (workspace, workspace))


def _held_by_all(parameter: torch.Tensor, ranks: int) -> int:
    """Elements of all distinct pieces, were all as large as this rank's."""
    return local(parameter).numel() * (ranks // holders(parameter, ranks))


def _tag_state(run: Run, tracker: Tracker) -> None:
    """Say what each storage is for."""
    masters = [p for p in run.model.parameters() if p.requires_grad and p.dtype != run.dtypes.compute]
    tracker.tag(masters, "master_weights")
    tracker.tag(run.model.parameters(), "parameters")
    tracker.tag(run.model.buffers(), "parameters")
    tracker.tag(run.passes.kept, "master_weights" if masters else "parameters")
    for state in run.optimizer.state.values():
        tracker.tag((v for v in state.values() if isinstance(v, torch.Tensor)), "optimizer_state")


def _fake_batches(run: Run, strategy: Strategy, recipe: Recipe, count: int, tracker: Tracker) -> list[Batch]:
    """All of a step's samples lie on the device from its start, also those that are not run here."""
    shapes = batch_shapes(run.blueprint, recipe.data)
    size = strategy[MICRO_BATCH_SIZE]
    batches = [
        {name: torch.zeros((size, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
        for _ in range(count)
    ]
    for batch in batches:
        tracker.tag(batch.values(), "activations")
    return batches


def _counted_step(
    run: Run, batches: list[Batch], tracker: Tracker, seen: int | None
) -> tuple[int, list[int]]:
    """Run the step; the tracker counts what each micro-batch costs, and the rest of the step.

    How many were run, and when passes of them began.
    """
    # Passes that read ahead of their step take whole steps.
    few = run.passes.enough(len(batches)) if seen is None or not run.passes.in_step else seen
    shown = batches[:few] * len(run.passes.reads(0, run.recipe.steps))

    entries: list[int] = []

    def entered(name: str) -> None:
        if current_micro_batch() is not None:
            entries.append(tracker.now)
        tracker.tag((p.grad for p in run.model.parameters() if p.grad is not None), "gradients")

    tracker.counting_costs = True
    with listening(entered):
        step(run, shown, learning_rate(run.recipe, 0))
    tracker.counting_costs = False
    return min(few, len(batches)), entries


def _pass_bytes(tracker: Tracker, entries: Sequence[int]) -> int:
    """Activations that live when the second pass of a step begins, beside those when the first did."""
    before, after = (ledger_at(tracker, time).activations for time in entries[:2])
    return after - before


def _whole_cost(tallies: Mapping[int | None, Tally], seen: int, count: int) -> StepCost:
    """The cost of ``count`` micro-batches of which ``seen`` were run: those, and more like the second.

    What was done ahead of the step's own is of later steps.
    """
    whole = Tally()
    own = {number: tally for number, tally in tallies.items() if number is None or number < seen}
    for number, tally in own.items():
        whole.add(tally, times=1 + count - seen if number == 1 else 1)
    return whole.cost()
