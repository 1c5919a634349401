"""The dry run: the trainer's own build and step on fake tensors, as one rank of a world of any size.

One step is enough: the optimizer's state exists from the start, so every step is like the first. Of many equal
micro-batches only as many are run as reach the peak (``representative_count``). The cost of one is counted and
multiplied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shardwise.core.block_times import BlockTimes
from shardwise.core.cost import Collective, StepCost
from shardwise.core.ledger import Ledger, Peak
from shardwise.core.plan import AllocationSite
from shardwise.core.strategy import Strategy
from shardwise.dryrun.block_times import block_times
from shardwise.dryrun.counting import dtype_name
from shardwise.dryrun.modules import RunningModule
from shardwise.dryrun.moments import MemoryMoments, moments
from shardwise.dryrun.reading import LedgerPoint, ledger_at, peaks, peaks_of_passes, timeline
from shardwise.dryrun.replay import Replay, Trace
from shardwise.dryrun.rollout import rehearse_rollout
from shardwise.dryrun.sharing import shared_dry_runs
from shardwise.dryrun.sites import sites_at_peak
from shardwise.dryrun.snapshot import memory_snapshot
from shardwise.dryrun.tally import Tally
from shardwise.dryrun.target import TARGET_KERNELS, TargetKernels
from shardwise.dryrun.tracker import Tracker, axis_names
from shardwise.dryrun.world import fake_world
from shardwise.engine.build import assemble, materialise
from shardwise.engine.optim.norm import local, shards_of
from shardwise.engine.phase import current_micro_batch, listening
from shardwise.engine.run import Run
from shardwise.engine.schedule import learning_rate
from shardwise.engine.snapshot import host_copies
from shardwise.engine.step import step
from shardwise.hardware.allocator_options import options_in
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Batch, Blueprint, batch_shapes
from shardwise.model.lora import weights_in
from shardwise.recipe.sections import Recipe
from shardwise.runtime.offload.host import separate_host_memory
from shardwise.runtime.torch_private import default_group
from shardwise.runtime.torch_private_fake import StaticFakeMode
from shardwise.technique import MICRO_BATCH_SIZE, layout_of, micro_batches
from shardwise.technique.place import Place, Reduced
from shardwise.technique.site import PlanHints, Site

WHOLE_STEP = Reduced()


@dataclass(frozen=True)
class DryRun:
    """What one rank of one strategy holds and does in one optimizer step.

    Attributes:
        peaks: the peak of every phase, without the profile's overhead.
        cost: kernels and collectives of the whole step, all micro-batches included.
        timeline: the ledger over the step.
        parameters: elements of the whole model, unsharded.
        even: whether every parameter shards evenly.
        compute_dtype: dtype of matrix products, as named in device profiles.
        trace: allocations and frees; None if the target's allocator does not cache.
        replay: the caching allocator's reserved memory without a limit.
        hints: rules for extrapolation, and notes for the plan.
        depth: blocks of the whole model, or of each of this rank's stages; None where that varies.
        place: this rank's place on an axis whose ranks hold different blocks, if there is one.
        pass_bytes: with a place, activations that the first micro-batch's forward pass leaves for its backward pass.
        pass_peaks: the peaks of some passes (peaks_of_passes), where the micro-batches were reduced.
        moments: memory at every moment, where it was asked for.
        sites: memory at the peak by allocation site; () without history.
        snapshot: for PyTorch's memory viewer, where it was asked for.
        blocks: which block ran when, in the first micro-batch; None without history.
        host: the peak of this rank's host memory, if it is separate from device memory.
        disk_bytes: what this rank reserves on a disk.
        saved_bytes: what this rank writes of a checkpoint.
        communicators: process groups of several ranks that it sends or receives in, that of all ranks among them.
    """

    rank: int
    peaks: dict[str, Peak]
    cost: StepCost
    timeline: tuple[LedgerPoint, ...]
    parameters: int
    even: bool
    compute_dtype: str
    trace: Trace | None = None
    replay: Replay | None = None
    hints: PlanHints = field(default_factory=PlanHints)
    host: Ledger = field(default_factory=Ledger)
    disk_bytes: int = 0
    saved_bytes: int = 0
    communicators: int = 0
    depth: int | None = None
    place: Place | None = None
    pass_bytes: int = 0
    pass_peaks: tuple[Peak, ...] = ()
    moments: MemoryMoments | None = None
    sites: tuple[AllocationSite, ...] = ()
    snapshot: Mapping[str, Any] | None = None
    blocks: BlockTimes | None = None

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.bytes)


MOST_LISTED = 1024
"""Micro-batches whose tensors are allocated one by one."""


def dry_run(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    cluster: Cluster,
    *,
    rank: int = 0,
    depth: int | None = None,
    reduced: Reduced = WHOLE_STEP,
    history: bool = True,
    with_moments: bool = False,
    with_snapshot: bool = False,
) -> DryRun:
    """Run one optimizer step as ``rank`` without allocating anything.

    Args:
        depth: number of blocks instead of the model's own.
        reduced: run less than a whole step. The default runs enough micro-batches to reach the peak of all.
        history, with_moments: whether to replay the allocator, and to name the memory at every moment.
        with_snapshot: whether to make a memory snapshot.
    """
    options = _DryRunOptions(rank, depth, reduced, history, with_moments, with_snapshot)
    shared = None if TARGET_KERNELS[cluster.device.kind].is_host else shared_dry_runs()
    if shared is None:
        return _run(recipe, blueprint, strategy, cluster, options)
    device = cluster.device
    key = (strategy, cluster.world_size, cluster.devices_per_node, device.kind, device.attention, options)
    if key not in shared:
        shared[key] = _run(recipe, blueprint, strategy, cluster, options)
    # Only the allocator's replay depends on the workspaces, so a device with others needs no further dry run.
    key_of_device = (*key, _workspaces(cluster))
    if key_of_device not in shared:
        shared[key_of_device] = _with_workspaces(shared[key], cluster)
    return shared[key_of_device]


class _DryRunOptions(NamedTuple):
    """What a dry run is asked for: the arguments of ``dry_run`` that have defaults."""

    rank: int
    depth: int | None
    reduced: Reduced
    history: bool
    with_moments: bool
    with_snapshot: bool


def _with_workspaces(run: DryRun, cluster: Cluster) -> DryRun:
    """A dry run on another device of its kind: the allocator's replay has that device's workspaces."""
    if run.trace is None or run.trace.workspaces == _workspaces(cluster):
        return run
    trace = replace(run.trace, workspaces=_workspaces(cluster))
    return replace(run, trace=trace, replay=trace.replayed(options_in(cluster.device.kind)))


def _run(
    recipe: Recipe, blueprint: Blueprint, strategy: Strategy, cluster: Cluster, options: _DryRunOptions
) -> DryRun:
    rank, depth, reduced, history, with_moments, with_snapshot = options
    world_size = cluster.world_size
    count = micro_batches(strategy, layout_of(strategy, world_size), recipe.batch_size)
    target = TARGET_KERNELS[cluster.device.kind]
    with fake_world(rank, world_size), separate_host_memory(not target.is_host):
        site = assemble(recipe, blueprint, strategy, world_size, "cpu", depth)
        if (pipeline := site.options.place) is not None:
            pipeline = pipeline.reduced(reduced)
            site.options.place = pipeline
        elements = weights_in(site.view.model)
        even = _is_even(site)
        modules = RunningModule(site.view.model)
        # Until here tensors are on the meta device: the mesh trips inside a fake mode (engine/build.py).
        fake = StaticFakeMode(allow_non_fake_inputs=True)
        tracker = _tracker(site, target, modules, fake)
        kernels = target.kernels(cluster.devices_per_node, cluster.device.attention)
        # Seeds of the step do not change the generators of the process that plans.
        with torch.random.fork_rng(devices=[]), fake, tracker.watching(), kernels, modules:
            step = _tracked_step(site, recipe, strategy, (count, reduced), tracker)
        trace = _trace(tracker, step.start, cluster) if history and target.caches else None
        names = [modules.named(block) for block in site.view.blocks]
    return DryRun(
        rank,
        peaks(tracker, since=step.start),
        whole_cost(tracker.tallies, step.few, count),
        tuple(timeline(tracker, since=step.start)) if history else (),
        elements,
        even,
        dtype_name(step.run.options.dtypes.compute),
        trace=trace,
        replay=trace.replayed(options_in(cluster.device.kind)) if trace is not None else None,
        hints=site.hints,
        host=max(peaks(tracker, step.start, on_host=True).values(), key=lambda peak: peak.bytes).ledger,
        disk_bytes=tracker.disk_bytes,
        saved_bytes=tracker.disk_bytes + _saved_bytes(step.run),
        communicators=len(tracker.groups),
        depth=blueprint.depth if pipeline is None else pipeline.depth,
        place=None if pipeline is None else pipeline.without_groups(),
        pass_bytes=_pass_bytes(tracker, step.passes) if pipeline is not None and history else 0,
        pass_peaks=() if reduced.micro_batches is None else peaks_of_passes(tracker, step.passes, step.few),
        moments=moments(tracker, step.start, depth) if with_moments else None,
        sites=sites_at_peak(tracker, step.start) if history else (),
        blocks=block_times(tracker, step.start, names) if history else None,
        snapshot=memory_snapshot(tracker, options_in(cluster.device.kind)) if with_snapshot else None,
    )


def place_of(
    recipe: Recipe, blueprint: Blueprint, strategy: Strategy, cluster: Cluster, rank: int
) -> Place | None:
    """The place of ``rank`` on an axis whose ranks hold different blocks. Runs nothing."""
    with fake_world(rank, cluster.world_size):
        return assemble(recipe, blueprint, strategy, cluster.world_size, "cpu", 1).options.place


def _tracker(site: Site, target: TargetKernels, modules: RunningModule, fake: StaticFakeMode) -> Tracker:
    """One that knows the mesh axis of every group."""
    mesh = site.context.mesh
    axes = [(name, mesh.get_group(name)) for name in mesh.mesh_dim_names or ()]
    groups = axis_names([*axes, *site.options.groups])
    tracker = Tracker(groups, target.workspace, target.kept, modules.name, modules.calls, fake.notes)
    if site.context.layout.world_size > 1:
        # The trainer asks all ranks together: whether to stop, say.
        tracker.groups.add(default_group().group_name)
    return tracker


def _is_even(site: Site) -> bool:
    """Whether every rank of this one's pipeline stage holds equally much of every parameter."""
    return all(p.numel() == local(p).numel() * shards_of(p) for p in site.view.model.parameters())


def _trace(tracker: Tracker, start: int, cluster: Cluster) -> Trace:
    """What the allocator is asked for: tensors, and the workspace of each of the two threads' products."""
    on_device = (replace(a) for a in tracker.allocations if not a.on_host)
    return Trace(tuple(on_device), start, _workspaces(cluster))


def _workspaces(cluster: Cluster) -> tuple[int, int]:
    workspace = cluster.device.overhead.workspace_bytes // 2
    return workspace, workspace


def _saved_bytes(run: Run) -> int:
    """Bytes of weights and optimizer state in memory, each divided among the ranks that hold the same shard."""
    saved = 0.0
    for parameter in run.model.parameters():
        state = (v for v in run.optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor))
        size = sum(local(tensor).numel() * tensor.itemsize for tensor in (parameter, *state))
        saved += size / run.ranks_of(parameter)
    return round(saved)


def _tag_state(run: Run, tracker: Tracker) -> None:
    """Say what each storage is for."""
    masters = [p for p in run.model.parameters() if p.requires_grad and p.dtype != run.options.dtypes.compute]
    tracker.tag(masters, "master_weights")
    tracker.tag(run.model.parameters(), "parameters")
    tracker.tag(run.model.buffers(), "parameters")
    for frozen in run.frozen.values():
        tracker.tag([*frozen.parameters(), *frozen.buffers()], "parameters")
    if run.first_values is not None:
        tracker.tag(run.first_values.values, "parameters")
    tracker.tag(run.passes.weight_copies, "master_weights" if masters else "parameters")
    for state in run.optimizer.state.values():
        tracker.tag((v for v in state.values() if isinstance(v, torch.Tensor)), "optimizer_state")


class _TrackedStep(NamedTuple):
    """A step that the tracker has seen.

    Attributes:
        few: the micro-batches that were run.
        start: the tracker's time before the step.
        passes: the tracker's time at the start of each pass, with its phase.
    """

    run: Run
    few: int
    start: int
    passes: list[tuple[int, str]]


def _tracked_step(
    site: Site, recipe: Recipe, strategy: Strategy, whole: tuple[int, Reduced], tracker: Tracker
) -> _TrackedStep:
    """Build and run one step within the tracker.

    Args:
        whole: the micro-batches of a step, and how far to reduce it.
    """
    count, reduced = whole
    run = materialise(site, torch.device("cpu"))
    _tag_state(run, tracker)
    copies = host_copies(run)  # a local: they live as long as the step
    tracker.tag(copies, "overhead")
    few = run.passes.representative_count(count, reduced.micro_batches)
    batches = _fake_batches(run, strategy, recipe, (few, count), tracker)
    start = tracker.now
    return _TrackedStep(run, few, start, _counted_step(run, batches[:few], tracker))


def _fake_batches(
    run: Run, strategy: Strategy, recipe: Recipe, counts: tuple[int, int], tracker: Tracker
) -> list[Batch]:
    """All of a step's samples lie on the device from its start, also those that are not run here.

    Args:
        counts: micro-batches that are run, and all. Of these, more than MOST_LISTED are one tensor of each kind.
    """
    shapes = batch_shapes(run.blueprint, recipe.data, run.objective)
    few, count = counts
    # The listed ones cost a fake tensor each; thousands more are as many bytes in one.
    listed = min(count, max(few, MOST_LISTED))
    sizes = [strategy[MICRO_BATCH_SIZE]] * listed
    if rest := count - listed:
        sizes.append(strategy[MICRO_BATCH_SIZE] * rest)
    batches = [
        {name: torch.zeros((size, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
        for size in sizes
    ]
    for batch in batches:
        tracker.tag(batch.values(), "activations")
    return batches


@dataclass(frozen=True)
class _Repeated:
    """A source whose steps have the same micro-batches; steps that epochs are not counted into yet never end."""

    batches: Sequence[Batch]
    steps: int | None

    def micro_batches(self, step: int) -> Sequence[Batch]:
        return () if self.steps and step >= self.steps else self.batches


def _counted_step(run: Run, batches: list[Batch], tracker: Tracker) -> list[tuple[int, str]]:
    """Run the step, after a rehearsal of the fill; the tracker counts the costs of each micro-batch, and of the rest.

    Returns when passes of the micro-batches began, and their phases.
    """
    run.passes.begin(_Repeated(batches, run.recipe.steps), 0)
    entries: list[tuple[int, str]] = []

    def entered(name: str) -> None:
        if current_micro_batch() is not None:
            entries.append((tracker.now, name))
        # Gradients are in ``.grad`` now, whatever made them: hooks do not see those that FSDP2 reduces.
        tracker.tag((p.grad for p in run.model.parameters() if p.grad is not None), "gradients")

    for parameter in run.model.parameters():
        if parameter.requires_grad:  # FSDP2's have other tensors in the graph
            parameter.register_hook(lambda gradient: tracker.tag([gradient], "gradients"))
    run.blueprint.rehearse_fill(run.model)
    tracker.counting_costs = True
    with listening(entered):
        rehearse_rollout(run, batches[0], tracker)
        step(run, batches, learning_rate(run.recipe, 0))
    tracker.counting_costs = False
    return entries


def _pass_bytes(tracker: Tracker, entries: Sequence[tuple[int, str]]) -> int:
    """Activations that one pass leaves: those at the start of the second pass minus those at the first."""
    before, after = (ledger_at(tracker, time).activations for time, _ in entries[:2])
    return after - before


def whole_cost(tallies: Mapping[int | None, Tally], seen: int, count: int) -> StepCost:
    """The cost of ``count`` micro-batches. ``seen`` of them were run; each of the others costs as much as the second.

    Micro-batches from ``seen`` on were run ahead and belong to later steps.
    """
    whole = Tally()
    passes: Counter[Collective] = Counter()
    for number, tally in tallies.items():
        if number is not None and number >= seen:
            continue
        # The first micro-batch gathers weights, and the last reduces gradients: only the second is like all others.
        times = 1 + count - seen if number == 1 else 1
        whole.add(tally, times)
        if number is not None:
            passes.update(dict.fromkeys(tally.collectives, times))
    return whole.cost(count, passes)
