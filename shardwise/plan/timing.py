"""Step time from the counts of a dry run: kernels by shape, collectives by size and topology, and what overlaps.

Within a phase (forward, backward, clip, optimizer):

- **The device** runs the kernels one after the other (plan/kernel_time.py), and waits for collectives on the critical
  path: those of tensor parallelism, all-to-alls, and single numbers that are summed over all ranks.
- **The host** launches kernels and collectives ahead of the device. A phase takes the longer of both.
- **Other collectives** overlap with them, on accelerators. Exposed is what takes longer than the passes of the
  micro-batches in which they are called, the first one of each pass, and ``interference`` for each overlapped second:
  both sides compete for multiprocessors and memory. On the CPU gloo blocks, so nothing overlaps.
- **Messages between stages** belong to their schedule, which is played with the seconds of every rank
  (technique/place.py). ``sending`` is what one of them takes.
- **Offload**: copies to and from the host, disk reads and writes, and CPU kernels run concurrently with the device. A
  phase takes the longest of them.

Totals of a phase and an axis are compared; streams are not simulated in order. A step whose communication is uneven
over its layers is therefore predicted too fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.core.cost import Collective, StepCost, Transfer
from shardwise.core.strategy import Layout
from shardwise.hardware.cluster import Cluster
from shardwise.plan.kernel_time import kernel_seconds, launched_together
from shardwise.technique import BLOCKING_AXES, STAGE_AXES

AWAITED = frozenset({"all_to_all"})
"""Collectives whose result is needed at once, so that nothing overlaps with them."""

CONTROL_AXIS = "control"
"""Axis of collectives of single numbers (dryrun/counting.py)."""

OVERLAPS: Mapping[str, bool] = {"cpu": False, "cuda": True, "rocm": True}

PASSES = ("forward", "backward")
"""Phases that every micro-batch goes through."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, in total and by kind of work.

    Attributes:
        passes: seconds of all micro-batches by phase, without messages between stages and without collectives that
            are called once a step.
        sending: seconds of one message to another stage.
    """

    seconds: float
    split: Mapping[str, float]
    passes: Mapping[str, float] = field(default_factory=dict)
    sending: float = 0.0


@dataclass
class _Phase:
    """Seconds of one phase.

    Attributes:
        blocking: collectives on the critical path.
        host: launches.
        hidden, once: collectives that overlap: those of every micro-batch, and those that are called once a step.
        first: the longest call of each of these, once for each pass in which there is one.
    """

    products: float = 0.0
    memory: float = 0.0
    blocking: float = 0.0
    host: float = 0.0
    hidden: float = 0.0
    first: float = 0.0
    once: float = 0.0
    first_once: float = 0.0

    @property
    def device(self) -> float:
        return self.products + self.memory

    @property
    def waits(self) -> float:
        """Seconds that the device waits for launches."""
        return max(0.0, self.host - self.device - self.blocking)

    @property
    def busy(self) -> float:
        """Device or host, whichever takes longer."""
        return self.device + self.blocking + self.waits


def step_time(cost: StepCost, layout: Layout, cluster: Cluster) -> StepTime:
    """Predicted time of one optimizer step of one rank."""
    phases, sending = _phases(cost, layout, cluster)
    overlaps, lost = OVERLAPS[cluster.device.kind], cluster.device.interference
    exposed, passes = 0.0, dict[str, float]()
    for name, phase in phases.items():
        every = _exposed(phase.hidden, phase.first, phase.busy, lost) if overlaps else phase.hidden
        window = phase.busy / cost.micro_batches if name in PASSES else phase.busy
        once = _exposed(phase.once, phase.first_once, window, lost) if overlaps else phase.once
        exposed += phase.blocking + every + once
        if name in PASSES:
            passes[name] = phase.busy + every
    split = {
        "matrix products": sum(phase.products for phase in phases.values()),
        "memory-bound": sum(phase.memory for phase in phases.values()),
        "exposed communication": exposed,
    }
    if waits := sum(phase.waits for phase in phases.values()):
        split["waiting for the host"] = waits
    if offloaded := offload_phases(cost, cluster):
        split["exposed offload"] = sum(phase.exposed for phase in offloaded)
    return StepTime(sum(split.values()), split, passes, sending)


def _exposed(hidden: float, first: float, window: float, lost: float) -> float:
    """Seconds that communication of ``hidden`` seconds adds to ``window`` seconds of other work.

    The first call has nothing to overlap with: what it is for comes after it. A last one has nothing after it.
    """
    behind = hidden - first
    return first + max(0.0, behind - window) + lost * min(behind, window)


def _phases(cost: StepCost, layout: Layout, cluster: Cluster) -> tuple[dict[str, _Phase], float]:
    """Every phase, and the seconds of the longest message between stages."""
    phases, device = dict[str, _Phase](), cluster.device
    launch, sending = device.launch, 0.0
    for kernel in cost.kernels:
        if kernel.on_host:
            continue
        phase = phases.setdefault(kernel.phase, _Phase())
        spent = kernel.calls * kernel_seconds(kernel, device)
        if kernel.flops:
            phase.products += spent
        else:
            phase.memory += spent
        phase.host += 0.0 if launched_together(kernel) else kernel.calls * launch.kernel
    for collective in cost.collectives:
        spent = collective_seconds(collective, layout, cluster)
        each = spent / collective.calls
        if collective.kind == "send" and collective.axis in STAGE_AXES:
            sending = max(sending, each)
            continue
        phase = phases.setdefault(collective.phase, _Phase())
        phase.host += collective.calls * launch.collective
        if _awaited(collective):
            phase.blocking += spent
        elif collective.passes < cost.micro_batches:
            phase.once += spent
            phase.first_once = max(phase.first_once, each)
        else:
            phase.hidden += spent
            phase.first = max(phase.first, each * collective.passes)
    for phase in phases.values():
        phase.first = min(phase.first, phase.hidden)
    return phases, sending


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
    if not cost.transfers and not any(kernel.on_host for kernel in cost.kernels):
        return []
    device: dict[str, float] = {}
    concurrent: dict[str, dict[str, float]] = {}
    for kernel in cost.kernels:
        spent = kernel.calls * kernel_seconds(kernel, cluster.device)
        if kernel.on_host:
            lane = concurrent.setdefault(kernel.phase, {})
            lane["processor"] = lane.get("processor", 0.0) + spent
        else:
            device[kernel.phase] = device.get(kernel.phase, 0.0) + spent
    for transfer in cost.transfers:
        lane = concurrent.setdefault(transfer.phase, {})
        lane[transfer.way] = lane.get(transfer.way, 0.0) + transfer_seconds(transfer, cluster)
    return [OffloadPhase(phase, device.get(phase, 0.0), lanes) for phase, lanes in concurrent.items()]


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Seconds of all calls of one transfer."""
    device = cluster.device
    if transfer.way.startswith("disk_"):
        return transfer.calls * transfer.bytes / device.disk_bandwidth
    return transfer.calls * transfer.bytes / (device.host_bandwidth * device.efficiency.host)


def _awaited(collective: Collective) -> bool:
    """Whether the collective's result is needed at once, so that nothing overlaps with it."""
    return collective.axis in (*BLOCKING_AXES, CONTROL_AXIS) or collective.kind in AWAITED


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
