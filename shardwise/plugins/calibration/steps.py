"""Times of the kernels within real steps of small models, and of the host around them.

A step runs plainly, for the seconds of its phases; then with a clock around each operation, for the seconds of each
kernel with the caches and memory of a step. What remains of a phase without its kernels is the host's: Python,
autograd and the dispatcher. Kernels are counted by the function of the dry run, so plans multiply these seconds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.core.cost import Collective, Kernel
from shardwise.dryrun.counting import collective_of, kernels_of
from shardwise.dryrun.tracker import axis_names
from shardwise.engine.build import build
from shardwise.engine.phase import current_phase
from shardwise.engine.run import Run
from shardwise.engine.step import step
from shardwise.engine.step_clock import OperationClock, PhaseClock, communicates
from shardwise.hardware.measured import IN_PLACE, NEW, Curve, MeasuredSpeeds, in_place, on_curve
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import layout_of, strategy_from

_TIMED_STEPS = 2
_LONGEST = 2.0
"""Bound of the seconds that a step waits for collectives, over those that they take by themselves."""

_LEAST, _MOST = 0.02, 50.0
"""Bounds of an operation's seconds over those of a plain kernel of as many bytes."""


@dataclass
class TimedStep:
    """One step under a clock: its kernels with their seconds, and its collectives; and seconds of phases without it."""

    phases: dict[str, float] = field(default_factory=dict)
    kernels: list[tuple[tuple[Kernel, ...], float]] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    views: list[float] = field(default_factory=list)

    @property
    def floor(self) -> float:
        """Seconds of an operation that does nothing, under the clock."""
        return statistics.median(self.views) if self.views else 0.0

    def own_kernels(self) -> Iterable[Kernel]:
        """The kernels of one step."""
        # All timed steps run the same kernels, so the first part of the list is one step.
        once = self.kernels[: len(self.kernels) // _TIMED_STEPS]
        return itertools.chain.from_iterable(kernels for kernels, _ in once)


def timed_step(
    model: Mapping[str, Any],
    length: int,
    micro_batch: int,
    settings: Mapping[str, Any],
    device: torch.device,
    plain_steps: int = 0,
) -> TimedStep:
    """Train a small model for a few steps on all ranks of the default group.

    Args:
        plain_steps: steps without a clock around the operations; with none, no seconds of phases are found.
    """
    world = dist.get_world_size()
    strategy = strategy_from({"micro_batch_size": micro_batch, **settings})
    batch = micro_batch * layout_of(strategy, world).data_degree
    recipe = recipe_of(
        {"model": dict(model), "data": {"sequence_length": length}, "steps": 100, "batch_size": batch}
    )
    run = build(recipe, blueprint_of(recipe), strategy, device)
    tokens = torch.randint(model["vocab"], (micro_batch, length), device=device)
    batches = [{"input_ids": tokens, "labels": tokens}]
    for _ in range(2):  # optimizer state is made in the first step; the second one reuses memory
        step(run, batches, 1e-4)
    readings: list[dict[str, float]] = []
    for _ in range(plain_steps):
        clock = PhaseClock(device)
        with clock.over():
            step(run, batches, 1e-4)
        readings.append(clock.read())
    names = readings[0] if readings else ()
    timed = TimedStep({name: statistics.median(reading[name] for reading in readings) for name in names})
    with _recorded(run, timed):
        for _ in range(_TIMED_STEPS):
            step(run, batches, 1e-4)
    timed.collectives = timed.collectives[: len(timed.collectives) // _TIMED_STEPS]
    return timed


def _recorded(run: Run, timed: TimedStep) -> OperationClock:
    """Writes the operations of a step into ``timed``."""
    mesh = run.context.mesh
    axes = [(name, mesh.get_group(name)) for name in mesh.mesh_dim_names or ()]
    axis_of = axis_names([*axes, *run.options.groups])

    def record(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, seconds: float) -> None:
        if communicates(func):
            if (collective := collective_of(current_phase(), func, args, kwargs, axis_of)) is not None:
                timed.collectives.append(collective)
        elif func.is_view:
            timed.views.append(seconds)
        elif kernels := kernels_of(current_phase(), func, args, kwargs, out):
            timed.kernels.append((tuple(kernels), seconds))

    return OperationClock(record)


def ratios(steps: Iterable[TimedStep], plain: Mapping[str, Curve]) -> dict[str, Curve]:
    """By operation and dtype: seconds over those of a plain kernel, over bytes in buckets of a factor of four.

    The median of the calls in a bucket: one that was interrupted counts no more than the others.
    """
    buckets: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timed in steps:
        for kernels, seconds in timed.kernels:
            if any(kernel.flops for kernel in kernels):  # products and attention have grids of their own
                continue
            curve = plain[IN_PLACE if in_place(kernels[0].operation) else NEW]
            expected = sum(on_curve(curve, kernel.bytes) for kernel in kernels)
            size = sum(kernel.bytes for kernel in kernels) / len(kernels)
            name = f"{kernels[0].operation} {kernels[0].dtype}"
            bucket = round(math.log(max(size, 1.0), 4))
            buckets[name, bucket].append(max(0.0, seconds - timed.floor) / expected)
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (name, bucket), bucket_ratios in sorted(buckets.items()):
        curves[name].append((4.0**bucket, min(max(statistics.median(bucket_ratios), _LEAST), _MOST)))
    return {name: tuple(curve) for name, curve in curves.items()}


def host_seconds(tiny: TimedStep, speeds: MeasuredSpeeds) -> dict[str, float]:
    """Seconds of the host around each kernel by phase, from the step of a tiny model on one process."""
    kernel_seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for kernel in tiny.own_kernels():
        kernel_seconds[kernel.phase] += speeds.kernel_seconds(kernel) or 0.0
        calls[kernel.phase] += 1
    return {
        phase: max(0.0, spent - kernel_seconds[phase]) / calls[phase]
        for phase, spent in tiny.phases.items()
        if calls[phase]
    }


def launch_seconds(tiny: TimedStep) -> dict[str, float]:
    """Seconds in which the host launches one kernel by phase, from the step of a tiny model: an accelerator waits."""
    calls = Counter(kernel.phase for kernel in tiny.own_kernels())
    return {phase: tiny.phases[phase] / count for phase, count in calls.items() if phase in tiny.phases}


def around_collectives(
    small: TimedStep, large: TimedStep, speeds: MeasuredSpeeds, axis: str
) -> tuple[float, float]:
    """Seconds of the host around each collective of a mesh axis, and the share of its own seconds that a step waits.

    Both explain the part of two steps that kernels and the host leave, one with small payloads and one with large ones.
    """
    first = _axis_time(small, speeds, axis)
    second = _axis_time(large, speeds, axis)
    if not first.calls:
        return 0.0, 1.0
    # Two equations, one for each step: calls * around + share * alone = in_step. Solved for share by Cramer's rule.
    determinant = first.calls * second.alone - second.calls * first.alone
    share = 1.0
    if determinant > 0:
        share = (first.calls * second.in_step - second.calls * first.in_step) / determinant
    share = min(max(share, 0.0), _LONGEST)
    return max(0.0, first.in_step - share * first.alone) / first.calls, share


class _AxisTime(NamedTuple):
    """The collectives of an axis: their number, their seconds by themselves, and the seconds of the step for them."""

    calls: int
    alone: float
    in_step: float


def _axis_time(timed: TimedStep, speeds: MeasuredSpeeds, axis: str) -> _AxisTime:
    """All that a step takes without its kernels, the host around them, and the collectives of other axes."""
    in_step = sum(timed.phases.values())
    in_step -= sum((speeds.kernel_seconds(k) or 0.0) + speeds.host_seconds(k) for k in timed.own_kernels())
    in_step -= sum(speeds.collective_seconds(c) or 0.0 for c in timed.collectives if c.axis != axis)
    alone = [speeds.collective_seconds(c) or 0.0 for c in timed.collectives if c.axis == axis]
    return _AxisTime(len(alone), sum(alone), in_step)
