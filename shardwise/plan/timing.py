"""From counted kernels and collectives to seconds: a roofline, and rings.

A kernel takes the longer of its arithmetic and its memory traffic, at the fractions of peak that the device's
profile gives, and no less than a launch. A collective takes a ring's time on the slowest link that its group
crosses. On accelerators communication overlaps with compute as FSDP2 issues it: per layer the longer of the
two counts, so what is exposed is what exceeds the compute of the pass, plus the first gathering, which nothing
hides. Collectives between two operations that need each other's results (tensor parallelism's, and all-to-alls) are
hidden by nothing. On the CPU gloo blocks, so everything adds up.

Copies between a device and its host, one way and the other, reads and writes of a disk, and what the processor
computes run beside the device: a phase takes the longest of these. The processor's kernels take their bytes at the
device's share of the host's memory bandwidth.

Chosen: totals per pass, not a simulation of streams in order. The price is that a step whose communication is
uneven over layers comes out too fast; a calibrated model with an event simulation is a later step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.core.cluster import Cluster
from shardwise.core.cost import Collective, Kernel, StepCost, Transfer
from shardwise.core.strategy import Layout
from shardwise.technique.base import BLOCKING_AXES

LAUNCH_SECONDS: Mapping[str, float] = {"cpu": 2e-6, "cuda": 5e-6, "rocm": 7e-6}
"""A floor per kernel in eager mode."""

AWAITED = frozenset({"all_to_all"})
"""Collectives whose result is computed with at once: nothing runs beside them."""

OVERLAPS: Mapping[str, bool] = {"cpu": False, "cuda": True, "rocm": True}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step and what they are spent on."""

    seconds: float
    split: Mapping[str, float]


def step_time(cost: StepCost, layout: Layout, cluster: Cluster) -> StepTime:
    """Predicted time of one step of one rank."""
    device = cluster.device
    compute = {"matrix products": 0.0, "memory-bound": 0.0}
    for kernel in cost.kernels:
        if not kernel.on_host:
            row = "matrix products" if kernel.flops else "memory-bound"
            compute[row] += kernel.calls * kernel_seconds(kernel, cluster)
    blocking = _sending([c for c in cost.collectives if _awaited(c)], layout, cluster)
    beside = [c for c in cost.collectives if not _awaited(c)]
    sending, busy = _sending(beside, layout, cluster), sum(compute.values())
    if OVERLAPS[device.kind]:
        first = max((collective_seconds(c, layout, cluster) / c.calls for c in beside), default=0.0)
        exposed = blocking + max(0.0, sending - busy) + min(first, sending)
    else:
        exposed = blocking + sending
    split = {**compute, "exposed communication": exposed}
    if offloaded := phases_beside_host(cost, cluster):
        split["exposed offload"] = sum(phase.exposed for phase in offloaded)
    return StepTime(sum(split.values()), split)


@dataclass(frozen=True)
class PhaseBesideHost:
    """Seconds of one phase: what the device computes, and what runs beside it (copies by way, the processor)."""

    phase: str
    device: float
    beside: Mapping[str, float]

    @property
    def longest_beside(self) -> float:
        return max(self.beside.values(), default=0.0)

    @property
    def exposed(self) -> float:
        """What the device waits."""
        return max(0.0, self.longest_beside - self.device)


def phases_beside_host(cost: StepCost, cluster: Cluster) -> list[PhaseBesideHost]:
    """Every phase in which anything is copied to or from the host or a disk, or computed on the host."""
    device: dict[str, float] = {}
    beside: dict[str, dict[str, float]] = {}
    for kernel in cost.kernels:
        spent = kernel.calls * kernel_seconds(kernel, cluster)
        if kernel.on_host:
            lane = beside.setdefault(kernel.phase, {})
            lane["processor"] = lane.get("processor", 0.0) + spent
        else:
            device[kernel.phase] = device.get(kernel.phase, 0.0) + spent
    for transfer in cost.transfers:
        lane = beside.setdefault(transfer.phase, {})
        lane[transfer.way] = lane.get(transfer.way, 0.0) + transfer_seconds(transfer, cluster)
    return [PhaseBesideHost(phase, device.get(phase, 0.0), lanes) for phase, lanes in beside.items()]


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float:
    """Time of all calls of one transfer."""
    device = cluster.device
    if transfer.way.startswith("disk_"):
        return transfer.calls * transfer.bytes / device.disk_bandwidth
    return transfer.calls * transfer.bytes / (device.host_bandwidth * device.efficiency.host)


def kernel_seconds(kernel: Kernel, cluster: Cluster) -> float:
    """Roofline time of one call. What runs on the host is memory-bound: updates of weights and moments."""
    device = cluster.device
    if kernel.on_host:
        return kernel.bytes / (device.host_memory_bandwidth * device.efficiency.memory)
    dtype = kernel.dtype if kernel.dtype in ("fp64", "fp32", "fp16", "bf16", "fp8") else "fp32"
    arithmetic = kernel.flops / (device.peak_flops(dtype) * device.efficiency.matmul)
    memory = kernel.bytes / (device.memory_bandwidth * device.efficiency.memory)
    return max(arithmetic, memory, LAUNCH_SECONDS[device.kind])


def _awaited(collective: Collective) -> bool:
    """Whether its result is computed with at once, so that nothing runs beside it."""
    return collective.axis in BLOCKING_AXES or collective.kind in AWAITED


def _sending(collectives: Sequence[Collective], layout: Layout, cluster: Cluster) -> float:
    return sum(collective_seconds(c, layout, cluster) for c in collectives)


def collective_seconds(collective: Collective, layout: Layout, cluster: Cluster) -> float:
    """Time of all calls of one collective: a ring's, or what an all-to-all or a send takes."""
    stride = layout.stride(collective.axis) if collective.axis in layout else 1
    degree, size = collective.degree, collective.bytes
    if collective.kind == "send":
        return collective.calls * cluster.seconds_to_next(size, degree, stride)
    if collective.kind == "all_to_all":
        return collective.calls * cluster.seconds_to_all(size, degree, stride)
    return collective.calls * cluster.link(degree, stride).seconds(size, collective.rounds)


def phase_seconds(cost: StepCost, cluster: Cluster) -> dict[str, float]:
    """What the device computes in every phase of a step."""
    spent: dict[str, float] = {}
    for kernel in cost.kernels:
        if not kernel.on_host:
            spent[kernel.phase] = spent.get(kernel.phase, 0.0) + kernel.calls * kernel_seconds(
                kernel, cluster
            )
    return spent


def mfu(cost: StepCost, seconds: float, dtype: str, cluster: Cluster) -> float:
    """Model FLOPs utilisation: FLOPs without recomputation over the peak in the compute dtype."""
    return cost.model_flops / (seconds * cluster.device.peak_flops(dtype))
