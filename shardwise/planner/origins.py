"""Where every figure of a plan comes from: it is counted, measured, or assumed with a source. No torch.

Figures are named by their keys in ``plan --json``. A key stands for everything below it, unless a longer key has an
origin of its own. A test goes through all numbers of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.answer import Answer, FigureOrigin
from shardwise.core.timetable import KEY
from shardwise.hardware.cluster import Cluster
from shardwise.recipe.sections import Recipe

PROFILES_PAGE = "docs/reference/presets.md"

COUNTED = (
    "allocated_bytes",
    "candidates.peak_bytes",
    "devices_per_node",
    "disk",
    "front.peak_bytes",
    "host.bytes",
    "host.ledger",
    "ladder.rungs.peak_bytes",
    "layout",
    "limits",
    "ledger",
    "micro_batches",
    "nearest.candidate.peak_bytes",
    "parameters",
    "peak",
    "sites",
    "blocks",
    KEY,
    "prices.bytes",
    "prices.candidate.peak_bytes",
    "step.flops",
    "step.model_flops",
    "step.tokens",
    "step.traffic_bytes",
    "timeline",
    "world_size",
)
ESTIMATED_SECONDS = (
    "candidates.split",
    "candidates.step_seconds",
    "devices.hours",
    "front.split",
    "front.step_seconds",
    "ladder.rungs.step_seconds",
    "nearest.candidate.split",
    "nearest.candidate.step_seconds",
    f"{KEY}.forward",
    f"{KEY}.backward",
    f"{KEY}.sending",
    "prices.candidate.split",
    "prices.candidate.step_seconds",
    "prices.time",
    "run.device_hours",
    "run.hours",
    "step.mfu",
    "step.phases",
    "step.seconds",
    "step.split",
    "step.tokens_per_second",
)
RECIPE_FIGURES = (
    "candidates.strategy",
    "front.strategy",
    "nearest.candidate.strategy",
    "prices.candidate.strategy",
    "run.devices",
    "run.epochs",
    "run.steps",
    "run.tokens",
    "devices.devices",
    "strategy",
)


def origins(recipe: Recipe, cluster: Cluster, answer: Answer) -> Iterator[FigureOrigin]:
    """The origin of every number in a plan and its answer."""
    device = cluster.device
    allocator = "" if device.traits.is_host else "; fragmentation by replaying the allocator"
    yield FigureOrigin(
        COUNTED, "counted", f"memory, FLOPs and traffic, by dry runs of the training step{allocator}"
    )
    yield FigureOrigin(RECIPE_FIGURES, "assumed", "the recipe, and values that the planner chose")
    yield FigureOrigin(
        ("standing",), "assumed", f"scaling law {recipe.law}, docs/how-to/choose-a-model-size.md"
    )
    if device.measured is not None:
        yield FigureOrigin(
            ESTIMATED_SECONDS,
            "measured",
            f"seconds of kernels, by doctor --calibrate on {device.measured_on}",
        )
    else:
        yield FigureOrigin(
            ESTIMATED_SECONDS, "assumed", f"seconds: figures of {device.name}, {_source(cluster, 'flops')}"
        )
    yield FigureOrigin(("capacity_bytes",), "assumed", f"capacity: {_source(cluster, 'memory_bytes')}")
    host = _source(cluster, "host_memory_bytes")
    yield FigureOrigin(("host.capacity_bytes",), "assumed", f"host memory: {host}")
    overhead = _source(cluster, "overhead.context_bytes")
    yield FigureOrigin(("ledger.overhead", "timeline.overhead"), "assumed", f"overhead: {overhead}")
    yield FigureOrigin(
        ("reserve_bytes",), "assumed", "reserve: workspaces of kernels, docs/concepts/allocator.md"
    )
    if answer.run.price is not None:
        priced = ("run.price", "run.cost", "devices.cost")
        yield FigureOrigin(priced, "assumed", "price: cluster.price_per_device_hour of the recipe")
    for key, interval in (("interval.hours", answer.run.likely_hours), ("interval.peak_bytes", answer.peak)):
        if interval is not None:
            yield FigureOrigin((key,), "measured", f"intervals: {interval.runs} {interval.source}")


def _source(cluster: Cluster, figure: str) -> str:
    """The source of one figure of the device, or the page that has them."""
    device = cluster.device
    source = cluster.device.source.get(figure, "")
    own = "of the recipe" in source or device.traits.is_host or device.file
    return source if own else PROFILES_PAGE
