"""Step time from the counts of a dry run: kernels by shape, collectives by size and topology, and what overlaps.

Within a phase (forward, backward, clip, optimizer):

- **The device** runs the kernels one after the other (kernel_time.py), and waits for collectives on the critical
  path: those of tensor parallelism, all-to-alls, and single numbers that are summed over all ranks.
- **The host** launches kernels and collectives ahead of the device. A phase takes the longer of both.
- **Other collectives** overlap with them, on accelerators. Exposed is what takes longer than the passes of the
  micro-batches in which they are called, the first one of each pass, and ``interference`` for each overlapped second:
  both sides compete for multiprocessors and memory. On the CPU gloo blocks, so nothing overlaps.
- **Messages between pipeline stages** belong to their schedule, which is played with the seconds of every rank
  (technique/place.py). ``sending`` is what one of them takes.
- **Offload**: copies to and from the host, disk reads and writes, and CPU kernels run concurrently with the device. A
  phase takes the longest of them.

Totals of a phase and an axis are compared; streams are not simulated in order. A step whose communication is uneven
over its layers is therefore predicted too fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardwise.core.cost import CONTROL_AXIS, Collective, Kernel, StepCost, Transfer
from shardwise.core.strategy import Layout
from shardwise.hardware.cluster import Cluster
from shardwise.planner.kernel_time import host_launch_seconds, kernel_seconds
from shardwise.technique import AXES

AWAITED = frozenset({"all_to_all"})
"""Collectives whose result is needed at once, so that nothing overlaps with them."""


_BLOCKING_AXES = tuple(axis.name for axis in AXES if axis.blocking)
_STAGE_AXES = tuple(axis.name for axis in AXES if axis.stages)

PASS_PHASES = ("forward", "backward")
"""Phases that every micro-batch goes through."""

# Columns of a phase's sums; those of copies follow.
PRODUCT_SECONDS, MEMORY_SECONDS, LAUNCH_SECONDS = range(3)
COPY_LANES: tuple[str, ...] = ("to_host", "to_device", "disk_read", "disk_write", "processor")
TIME_COLUMNS = 3 + len(COPY_LANES)
"""What adds up over the calls of a phase: seconds of matrix products, of memory-bound kernels, of the host that
launches them; then of each lane that works concurrently with the device."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, in total and by kind of work.

    Attributes:
        passes: seconds of all micro-batches by phase, without messages between stages and without collectives that
            are called once a step.
        sending: seconds of one message to another pipeline stage.
    """

    seconds: float
    split: Mapping[str, float]
    passes: Mapping[str, float] = field(default_factory=dict)
    sending: float = 0.0


@dataclass(frozen=True)
class CollectiveCalls:
    """All calls of one collective in a step: their number, the micro-batches in which they are, seconds of each."""

    collective: Collective
    calls: float
    passes: float
    seconds: float


@dataclass
class _Phase:
    """Seconds of one phase.

    Attributes:
        sums: by column.
        blocking: collectives on the critical path.
        hidden, once: collectives that overlap: those of every micro-batch, and those that are called once a step.
        first: the longest call of each of these, once for each pass in which there is one.
    """

    sums: list[float]
    blocking: float = 0.0
    hidden: float = 0.0
    first: float = 0.0
    once: float = 0.0
    first_once: float = 0.0

    @property
    def device(self) -> float:
        return self.sums[PRODUCT_SECONDS] + self.sums[MEMORY_SECONDS]

    @property
    def waits(self) -> float:
        """Seconds that the device waits for launches."""
        return max(0.0, self.sums[LAUNCH_SECONDS] - self.device - self.blocking)


def predicted_step_time(cost: StepCost, layout: Layout, cluster: Cluster) -> StepTime:
    """Predicted time of one optimizer step of one rank."""
    exchanges = [
        CollectiveCalls(
            collective,
            collective.calls,
            collective.passes,
            collective_seconds(replace(collective, calls=1), layout, cluster),
        )
        for collective in cost.collectives
    ]
    return combined_time(_seconds_by_phase(cost, cluster), exchanges, cost.micro_batches, cluster)


def combined_time(
    sums: Mapping[str, list[float]],
    exchanges: Iterable[CollectiveCalls],
    micro_batches: float,
    cluster: Cluster,
) -> StepTime:
    """The time of a step from its sums by phase, which it changes, and its collectives."""
    phases = {name: _Phase(row) for name, row in sums.items()}
    sending = 0.0
    for exchange in exchanges:
        collective = exchange.collective
        spent = exchange.calls * exchange.seconds
        if collective.kind == "send" and collective.axis in _STAGE_AXES:
            sending = max(sending, exchange.seconds)
            continue
        phase = phases.get(collective.phase)
        if phase is None:
            phase = phases[collective.phase] = _Phase([0.0] * TIME_COLUMNS)
        phase.sums[LAUNCH_SECONDS] += exchange.calls * cluster.device.launch.collective
        if _awaited(collective):
            phase.blocking += spent
        elif exchange.passes < micro_batches:
            phase.once += spent
            phase.first_once = max(phase.first_once, exchange.seconds)
        else:
            phase.hidden += spent
            phase.first = max(phase.first, exchange.seconds * exchange.passes)
    return _played(phases, sending, micro_batches, cluster)


def _played(phases: Mapping[str, _Phase], sending: float, micro_batches: float, cluster: Cluster) -> StepTime:
    overlaps = cluster.device.traits.overlaps
    lost = cluster.device.interference
    products = memory = exposed = waits = offloaded = 0.0
    passes = dict[str, float]()
    lanes = False
    for name, phase in phases.items():
        waiting, device = phase.waits, phase.device
        busy = device + phase.blocking + waiting
        every, once = phase.hidden, phase.once
        if overlaps:
            # A step calls these once, in one of its micro-batches, so they overlap with that one alone.
            window = busy / micro_batches if name in PASS_PHASES else busy
            every = _exposed(every, min(phase.first, every), busy, lost)
            once = _exposed(once, phase.first_once, window, lost)
        products += phase.sums[PRODUCT_SECONDS]
        memory += phase.sums[MEMORY_SECONDS]
        waits += waiting
        exposed += phase.blocking + every + once
        if name in PASS_PHASES:
            passes[name] = busy + every
        longest = max(phase.sums[3:])
        lanes |= longest > 0
        offloaded += max(0.0, longest - device) if longest > 0 else 0.0
    split = {"matrix products": products, "memory-bound": memory, "exposed communication": exposed}
    if waits:
        split["waiting for the host"] = waits
    if lanes:
        split["exposed offload"] = offloaded
    return StepTime(sum(split.values()), split, passes, sending)


def _exposed(hidden: float, first: float, window: float, lost: float) -> float:
    """Seconds that communication of ``hidden`` seconds adds to ``window`` seconds of other work.

    The first call has nothing to overlap with: what it is for comes after it. A last one has nothing after it.
    """
    behind = hidden - first
    return first + max(0.0, behind - window) + lost * min(behind, window)


def _seconds_by_phase(cost: StepCost, cluster: Cluster) -> dict[str, list[float]]:
    sums: dict[str, list[float]] = {}
    calls: tuple[Kernel | Transfer, ...] = (*cost.kernels, *cost.transfers)
    for call in calls:
        add_call(sums, call, call.calls, cluster)
    return sums


def add_call(sums: dict[str, list[float]], call: Kernel | Transfer, calls: float, cluster: Cluster) -> None:
    """Add the seconds of ``calls`` calls of a kernel or a copy to the sums of its phase."""
    row = sums.get(call.phase)
    if row is None:
        row = sums[call.phase] = [0.0] * TIME_COLUMNS
    if isinstance(call, Transfer):
        row[3 + COPY_LANES.index(call.way)] += calls * transfer_seconds(replace(call, calls=1), cluster)
        return
    spent = calls * kernel_seconds(call, cluster.device)
    if call.on_host:
        row[3 + COPY_LANES.index("processor")] += spent
        return
    row[PRODUCT_SECONDS if call.flops else MEMORY_SECONDS] += spent
    row[LAUNCH_SECONDS] += calls * host_launch_seconds(call, cluster.device)


@dataclass(frozen=True)
class OffloadPhase:
    """Seconds of one phase: the device's compute, and concurrent copies, disk transfers and CPU kernels."""

    phase: str
    device: float
    concurrent: Mapping[str, float]

    @property
    def longest(self) -> float:
        return max(self.concurrent.values(), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds that the device waits."""
        return max(0.0, self.longest - self.device)


def offload_phases(cost: StepCost, cluster: Cluster) -> list[OffloadPhase]:
    """The phases with copies to or from the host or a disk, or with CPU kernels."""
    phases = []
    for phase, row in _seconds_by_phase(cost, cluster).items():
        lanes = {lane: spent for lane, spent in zip(COPY_LANES, row[3:], strict=True) if spent > 0}
        if lanes:
            phases.append(OffloadPhase(phase, row[PRODUCT_SECONDS] + row[MEMORY_SECONDS], lanes))
    return phases


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Seconds of all calls of one transfer."""
    device = cluster.device
    if transfer.way.startswith("disk_"):
        return transfer.calls * transfer.bytes / device.disk_bandwidth
    return transfer.calls * transfer.bytes / (device.host_bandwidth * device.efficiency.host)


def _awaited(collective: Collective) -> bool:
    """Whether the collective's result is needed at once, so that nothing overlaps with it."""
    return collective.axis in (*_BLOCKING_AXES, CONTROL_AXIS) or collective.kind in AWAITED


def collective_seconds(collective: Collective, layout: Layout, cluster: Cluster) -> float:
    """Seconds of all calls of one collective: a ring, an all-to-all or a send."""
    stride = layout.stride(collective.axis) if collective.axis in layout else 1
    degree, size = collective.degree, collective.bytes
    measured = cluster.device.measured
    if measured is not None and (spent := measured.collective_seconds(collective)) is not None:
        return collective.calls * spent
    if collective.kind == "send":
        return collective.calls * cluster.seconds_to_next(size, degree, stride)
    if collective.kind == "all_to_all":
        return collective.calls * cluster.seconds_to_all(size, degree, stride)
    return collective.calls * cluster.link(degree, stride).seconds(size, collective.rounds)


def mfu(model_flops: int, seconds: float, dtype: str, cluster: Cluster) -> float:
    """Model FLOPs utilisation: model FLOPs of the whole step over what all devices could do in the compute dtype."""
    return model_flops / (seconds * cluster.world_size * cluster.device.peak_flops(dtype))
