"""``shardwise plan --for devices``: the fewest devices on which a recipe fits and its steps take at most so many hours.

Tried are the divisors of a node's devices, then whole nodes by powers of two, up to the recipe's cluster. The search
halves this list, as more devices take fewer hours: each one tried is planned for the least seconds of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.core.answer import DeviceTry
from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.plan import Plan
from shardwise.core.progress import Progress, silent
from shardwise.core.units import format_seconds
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.jobs.planning import make_plan, refuse_unfit
from shardwise.recipe.sections import Recipe


def fewest_devices(
    recipe: Recipe, cluster: Cluster, hours: float | None, progress: Progress = silent
) -> tuple[Recipe, Cluster, tuple[DeviceTry, ...]]:
    """The recipe on the fewest devices, its cluster, and all that were tried, the fewest first; loads torch.

    Args:
        hours: that the recipe's steps may take, by the predicted time; None for any.

    Raises:
        ResourceError: it does not fit, or takes longer, on the recipe's own cluster.
    """
    if hours is not None and not recipe.steps:
        why = "hours are of steps, and the steps of epochs are counted from the data by shardwise train"
        raise RecipeError("--within needs steps", where="epochs", why=why, fix="give steps in the recipe")
    search = _Search(recipe, cluster, hours, progress)
    whole = search.plan(_cluster_size(cluster))
    refuse_unfit(whole)
    if hours is not None and _run_hours(recipe, whole) > hours:
        raise ResourceError(
            f"takes longer than {hours:g} h on all devices",
            where=cluster.name,
            why=f"{recipe.steps:,} steps take {format_seconds(3600 * _run_hours(recipe, whole))}",
            fix="add devices to the cluster, or lower steps",
        )
    sizes = list(_sizes(cluster))
    found = sizes[bisect_left(sizes, True, key=search.enough)]
    asked = search.on(found)
    return (
        asked,
        cluster_of(asked.cluster),
        tuple(search.tried[size] for size in sizes if size in search.tried),
    )


_Size = tuple[int, int]
"""Nodes, and devices of each."""


def _cluster_size(cluster: Cluster) -> _Size:
    return cluster.nodes, cluster.devices_per_node


def _sizes(cluster: Cluster) -> Iterator[_Size]:
    nodes, node = _cluster_size(cluster)
    yield from ((1, each) for each in range(1, node) if node % each == 0)
    powers = (2**power for power in range(nodes.bit_length()))
    yield from ((count, node) for count in sorted({*powers, nodes}))


def _run_hours(recipe: Recipe, plan: Plan) -> float:
    return recipe.steps * plan.step.seconds / 3600


@dataclass
class _Search:
    recipe: Recipe
    cluster: Cluster
    hours: float | None
    progress: Progress
    tried: dict[_Size, DeviceTry] = field(default_factory=dict)

    def on(self, size: _Size) -> Recipe:
        """The recipe on as many devices."""
        device = self.cluster.device
        name = device.kind if device.traits.is_host else device.file or device.name
        changed = {"preset": None, "device": name, "nodes": size[0], "devices_per_node": size[1]}
        return self.recipe.model_copy(update={"cluster": self.recipe.cluster.model_copy(update=changed)})

    def plan(self, size: _Size) -> Plan:
        asked, devices = self.on(size), size[0] * size[1]
        plan = make_plan(
            asked,
            cluster_of(asked.cluster),
            progress=lambda line: self.progress(f"{devices} devices: {line}"),
        )
        hours = _run_hours(self.recipe, plan)
        verdict = "does not fit" if not plan.fits else "enough"
        if plan.fits and self.hours is not None and hours > self.hours:
            verdict = "takes longer"
        price = self.recipe.cluster.price_per_device_hour
        cost = None if price is None else devices * hours * price
        self.tried[size] = DeviceTry(devices, hours, cost, verdict)
        return plan

    def enough(self, size: _Size) -> bool:
        if size not in self.tried:
            try:
                self.plan(size)
            except RecipeError as error:  # the pinned settings need more devices, say
                self.tried[size] = DeviceTry(size[0] * size[1], 0.0, None, f"not possible: {error.what}")
        return self.tried[size].verdict == "enough"
