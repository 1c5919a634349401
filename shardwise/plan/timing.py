"""Step time: a roofline over the counted kernels, ring times of the counted collectives, and overlap.

- **Kernels** take the longer of compute and memory time, at the achieved fractions of the device's peaks, and at least
  the launch overhead. Their FLOPs are those that they execute: a causal kernel skips half of the scores, a
  masked one none.
- **Collectives** take a ring's time on the slowest link of the group. On accelerators FSDP2 overlaps them with compute.
  Exposed is the part that exceeds the compute of the step, plus the first all-gather. Collectives on the critical path
  (tensor parallelism, all-to-all) do not overlap. On the CPU gloo blocks, so nothing overlaps.
- **Offload**: copies to and from the host, disk reads and writes, and CPU kernels run concurrently with the device. A
  phase takes the longest of them. CPU kernels are memory-bound, at the device's share of the host memory bandwidth.

Totals per step are compared; streams are not simulated in order. A step whose communication is uneven over its layers
is therefore predicted too fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.core.cost import Collective, Kernel, StepCost, Transfer
from shardwise.core.strategy import Layout
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.device import DeviceProfile
from shardwise.technique import BLOCKING_AXES

LAUNCH_SECONDS: Mapping[str, float] = {"cpu": 2e-6, "cuda": 5e-6, "rocm": 7e-6}
"""Minimum seconds per kernel in eager mode."""

AWAITED = frozenset({"all_to_all"})
"""Collectives whose result is needed at once, so that nothing overlaps with them."""

OVERLAPS: Mapping[str, bool] = {"cpu": False, "cuda": True, "rocm": True}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, in total and by kind of work."""

    seconds: float
    split: Mapping[str, float]


def step_time(cost: StepCost, layout: Layout, cluster: Cluster) -> StepTime:
    """Predicted time of one optimizer step of one rank."""
    device = cluster.device
    compute = {"matrix products": 0.0, "memory-bound": 0.0}
    for kernel in cost.kernels:
        if not kernel.on_host:
            row = "matrix products" if kernel.flops else "memory-bound"
            compute[row] += kernel.calls * kernel_seconds(kernel, cluster)
    blocking = _sending([c for c in cost.collectives if _awaited(c)], layout, cluster)
    overlapped = [c for c in cost.collectives if not _awaited(c)]
    sending, busy = _sending(overlapped, layout, cluster), sum(compute.values())
    if OVERLAPS[device.kind]:
        first = max((collective_seconds(c, layout, cluster) / c.calls for c in overlapped), default=0.0)
        exposed = blocking + max(0.0, sending - busy) + min(first, sending)
    else:
        exposed = blocking + sending
    split = {**compute, "exposed communication": exposed}
    if offloaded := offload_phases(cost, cluster):
        split["exposed offload"] = sum(phase.exposed for phase in offloaded)
    return StepTime(sum(split.values()), split)


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
    device: dict[str, float] = {}
    concurrent: dict[str, dict[str, float]] = {}
    for kernel in cost.kernels:
        spent = kernel.calls * kernel_seconds(kernel, cluster)
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


def kernel_seconds(kernel: Kernel, cluster: Cluster) -> float:
    """Seconds of one call: measured ones where the device was calibrated, else those of the roofline."""
    device, measured = cluster.device, cluster.device.measured
    if measured is None or (kernel.on_host and device.kind != "cpu"):
        return _roofline(kernel, device)
    seconds = measured.kernel_seconds(kernel)
    return (_roofline(kernel, device) if seconds is None else seconds) + measured.host_seconds(kernel)


def _roofline(kernel: Kernel, device: DeviceProfile) -> float:
    """Seconds by the peaks of the profile. CPU kernels update weights and moments, and are memory-bound."""
    if kernel.on_host:
        return kernel.bytes / (device.host_memory_bandwidth * device.efficiency.memory)
    dtype = kernel.dtype if kernel.dtype in ("fp64", "fp32", "fp16", "bf16", "fp8") else "fp32"
    arithmetic = kernel.flops / (device.peak_flops(dtype) * device.efficiency.matmul)
    memory = kernel.bytes / (device.memory_bandwidth * device.efficiency.memory)
    return max(arithmetic, memory, LAUNCH_SECONDS[device.kind])


def _awaited(collective: Collective) -> bool:
    """Whether the collective's result is needed at once, so that nothing overlaps with it."""
    return collective.axis in BLOCKING_AXES or collective.kind in AWAITED


def _sending(collectives: Sequence[Collective], layout: Layout, cluster: Cluster) -> float:
    return sum(collective_seconds(c, layout, cluster) for c in collectives)


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


def phase_seconds(cost: StepCost, cluster: Cluster) -> dict[str, float]:
    """Seconds of device compute by phase."""
    spent: dict[str, float] = {}
    for kernel in cost.kernels:
        if not kernel.on_host:
            spent[kernel.phase] = spent.get(kernel.phase, 0.0) + kernel.calls * kernel_seconds(
                kernel, cluster
            )
    return spent


def mfu(model_flops: int, seconds: float, dtype: str, cluster: Cluster) -> float:
    """Model FLOPs utilisation: model FLOPs of the whole step over what all devices could do in the compute dtype."""
    return model_flops / (seconds * cluster.world_size * cluster.device.peak_flops(dtype))
