"""The dry run: the trainer's own build and step on fake tensors, as one rank of a world of any size.

One step is enough: the optimizer's state exists from the start, so every step is like the first. Of many equal
micro-batches only the first, one from the middle and the last are run: the peak does not depend on how many
lie between, and their cost is counted once and multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.core.allocator_options import options_in
from shardwise.core.cluster import Cluster
from shardwise.core.cost import StepCost
from shardwise.core.ledger import Ledger, Peak
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Strategy
from shardwise.dryrun.counting import dtype_name
from shardwise.dryrun.modules import RunningModule
from shardwise.dryrun.reading import Sample, peaks, timeline
from shardwise.dryrun.replay import Replay, Trace
from shardwise.dryrun.tally import Tally
from shardwise.dryrun.target import TARGETS
from shardwise.dryrun.tracker import Tracker, axis_names
from shardwise.dryrun.world import fake_world
from shardwise.engine.build import Run, assemble, materialise
from shardwise.engine.optim.norm import holders, local
from shardwise.engine.phase import listening
from shardwise.engine.schedule import learning_rate
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch, Blueprint
from shardwise.model.host import memories_apart
from shardwise.technique import MICRO_BATCH_SIZE, layout_of, micro_batches

SEEN_MICRO_BATCHES = 3


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
        host: what this rank holds in host memory when that is most, where it is another memory than the device's.
        disk_bytes: what this rank reserves on a disk.
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
    shallowest: int = 1

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
    seen: int = SEEN_MICRO_BATCHES,
    history: bool = True,
) -> DryRun:
    """Run one optimizer step as ``rank`` without allocating anything.

    Args:
        depth: number of blocks instead of the model's own.
        seen: at most how many micro-batches to run; the rest is like the middle one.
        history: whether to read off the timeline, and to replay what was allocated.
    """
    world_size = cluster.world_size
    layout = layout_of(strategy, world_size)
    count = micro_batches(strategy, layout, recipe.batch_size)
    target = TARGETS[cluster.device.kind]
    with fake_world(rank, world_size), memories_apart(not target.is_host):
        site = assemble(blueprint, strategy, world_size, "cpu", depth)
        parameters = sum(p.numel() for p in site.model.parameters())
        even = all(p.numel() == _held_by_all(p, world_size) for p in site.model.parameters())
        groups = {name: site.mesh.get_group(name) for name in site.mesh.mesh_dim_names or ()}
        modules = RunningModule(site.model)
        tracker = Tracker(axis_names(groups), target.workspace, target.kept, modules.name)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.random.fork_rng(devices=[]), fake, tracker.watching(), target.kernels(), modules:
            run = materialise(site, recipe, blueprint, torch.device("cpu"))
            _tag_state(run, tracker)
            snapshots: Snapshots[None] | None = snapshots_of(run)
            if snapshots is not None:
                tracker.tag(snapshots.buffers, "overhead")
            # All of a step's samples lie on the device from its start, also those that are not run here.
            batches = _fake_batches(run, strategy, recipe, count)
            for batch in batches:
                tracker.tag(batch.values(), "activations")
            start = tracker.now
            costs = _counted_step(run, [*batches[: min(count, seen) - 1], batches[-1]], tracker)
        found = peaks(tracker, since=start)
        host = max(peaks(tracker, start, on_host=True).values(), key=lambda peak: peak.bytes).ledger
        samples = tuple(timeline(tracker, since=start)) if history else ()
        trace = _trace(tracker, start, cluster) if history and target.caches else None
    compute = dtype_name(run.dtypes.compute)
    cost, notes = _whole_cost(costs, count), tuple(site.notes)
    replay = trace.replayed(options_in(cluster.device.kind)) if trace is not None else None
    rest = trace, replay, notes, site.period, host, tracker.disk_bytes, site.shallowest
    return DryRun(rank, found, cost, samples, parameters, even, compute, *rest)


def _trace(tracker: Tracker, start: int, cluster: Cluster) -> Trace:
    """What the allocator is asked for: tensors, and the workspace of each of the two threads' products."""
    workspace = cluster.device.overhead.workspace_bytes // 2
    on_device = (replace(a) for a in tracker.allocations if not a.on_host)
    return Trace(tuple(on_device), start, (workspace, workspace))


def _held_by_all(parameter: torch.Tensor, world_size: int) -> int:
    """Elements of all distinct pieces, were all as large as this rank's."""
    return local(parameter).numel() * (world_size // holders(parameter, world_size))


def _tag_state(run: Run, tracker: Tracker) -> None:
    """Say what each storage is for."""
    mixed = any(p.dtype != run.dtypes.compute for p in run.model.parameters())
    tracker.tag(run.model.parameters(), "master_weights" if mixed else "parameters")
    tracker.tag(run.model.buffers(), "parameters")
    for state in run.optimizer.state.values():
        tracker.tag((v for v in state.values() if isinstance(v, torch.Tensor)), "optimizer_state")


def _fake_batches(run: Run, strategy: Strategy, recipe: Recipe, count: int) -> list[Batch]:
    shapes = run.blueprint.sample_shapes(recipe.data.sequence_length)
    size = strategy[MICRO_BATCH_SIZE]
    return [
        {name: torch.zeros((size, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
        for _ in range(count)
    ]


@dataclass(frozen=True)
class _Costs:
    """What every micro-batch that was run costs, and the rest of the step."""

    per_micro_batch: list[Tally]
    rest: Tally


def _counted_step(run: Run, batches: list[Batch], tracker: Tracker) -> _Costs:
    """Run the step; split what it costs by micro-batch, by listening where techniques listen."""
    marks: list[Tally] = []

    def mark(_: bool) -> None:
        marks.append(tracker.tally.copy())

    def entered(name: str) -> None:
        if name == "clip":
            mark(True)
        tracker.tag((p.grad for p in run.model.parameters() if p.grad is not None), "gradients")

    run.micro_batch_hooks.append(mark)
    tracker.counting_costs = True
    with listening(entered):
        step(run, batches, learning_rate(run.recipe, 0))
    tracker.counting_costs = False
    run.micro_batch_hooks.remove(mark)
    rest = marks[0].copy()
    rest.add(tracker.tally - marks[-1])
    return _Costs([after - before for before, after in pairwise(marks)], rest)


def _whole_cost(costs: _Costs, count: int) -> StepCost:
    """The cost of ``count`` micro-batches: the first, the last, and copies of the one between."""
    whole = costs.rest.copy()
    for index, some in enumerate(costs.per_micro_batch):
        middle = index == 1 and len(costs.per_micro_batch) == SEEN_MICRO_BATCHES
        whole.add(some, times=count - 2 if middle else 1)
    return whole.cost()
