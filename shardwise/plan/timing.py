"""From counted kernels and collectives to seconds: a roofline, and rings.

A kernel takes the longer of its arithmetic and its memory traffic, at the fractions of peak that the device's
profile gives, and no less than a launch. A collective takes a ring's time on the slowest link that its group
crosses. On accelerators communication overlaps with compute as FSDP2 issues it: per layer the longer of the
two counts, so what is exposed is what exceeds the compute of the pass, plus the first gathering, which nothing
hides. On the CPU gloo blocks, so everything adds up.

Chosen: totals per pass, not a simulation of streams in order. The price is that a step whose communication is
uneven over layers comes out too fast; a calibrated model with an event simulation is a later step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core.cluster import Cluster
from shardwise.core.cost import Collective, Kernel, StepCost
from shardwise.core.strategy import Layout

LAUNCH_SECONDS: Mapping[str, float] = {"cpu": 2e-6, "cuda": 5e-6, "rocm": 7e-6}
"""A floor per kernel in eager mode."""

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
        row = "matrix products" if kernel.flops else "memory-bound"
        compute[row] += kernel.calls * kernel_seconds(kernel, cluster)
    sending = sum(collective_seconds(c, layout, cluster) for c in cost.collectives)
    busy = sum(compute.values())
    if OVERLAPS[device.kind]:
        first = max((collective_seconds(c, layout, cluster) / c.calls for c in cost.collectives), default=0.0)
        exposed = max(0.0, sending - busy) + min(first, sending)
    else:
        exposed = sending
    split = {**compute, "exposed communication": exposed}
    return StepTime(sum(split.values()), split)


def kernel_seconds(kernel: Kernel, cluster: Cluster) -> float:
    """Roofline time of one call."""
    device = cluster.device
    dtype = kernel.dtype if kernel.dtype in ("fp64", "fp32", "fp16", "bf16", "fp8") else "fp32"
    arithmetic = kernel.flops / (device.peak_flops(dtype) * device.efficiency.matmul)
    memory = kernel.bytes / (device.memory_bandwidth * device.efficiency.memory)
    return max(arithmetic, memory, LAUNCH_SECONDS[device.kind])


def collective_seconds(collective: Collective, layout: Layout, cluster: Cluster) -> float:
    """Ring time of all calls of one collective."""
    stride = layout.stride(collective.axis) if collective.axis in layout.names else 1
    link = cluster.link(collective.degree, stride)
    return collective.calls * link.seconds(collective.bytes, collective.rounds)


def mfu(cost: StepCost, seconds: float, dtype: str, cluster: Cluster) -> float:
    """Model FLOPs utilisation: FLOPs without recomputation over the peak in the compute dtype."""
    return cost.model_flops / (seconds * cluster.device.peak_flops(dtype))
