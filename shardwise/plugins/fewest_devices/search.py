"""``shardwise plan --for devices``: the fewest devices on which a recipe fits and its steps take at most so many hours.

Tried are the divisors of a node's devices, then whole nodes by powers of two, up to the recipe's cluster. The search
halves this list, as more devices take fewer hours: each one tried is planned for the least seconds of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from shardwise.core.answer import DeviceTry
from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.plan import Plan
from shardwise.core.progress import Progress, silent
from shardwise.core.units import format_seconds
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.jobs.planning import make_plan, refuse_unfit
from shardwise.recipe.cluster_sizes import ClusterSize, resized, sizes
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
    whole = search.plan((cluster.nodes, cluster.devices_per_node))
    refuse_unfit(whole)
    if hours is not None and _run_hours(recipe, whole) > hours:
        raise ResourceError(
            f"takes longer than {hours:g} h on all devices",
            where=cluster.name,
            why=f"{recipe.steps:,} steps take {format_seconds(3600 * _run_hours(recipe, whole))}",
            fix="add devices to the cluster, or lower steps",
        )
    listed = list(sizes(cluster, cluster.nodes))
    smallest_size = listed[bisect_left(listed, True, key=search.enough)]
    asked = resized(recipe, cluster, smallest_size)
    return (
        asked,
        cluster_of(asked.cluster),
        tuple(search.tried[size] for size in listed if size in search.tried),
    )


def _run_hours(recipe: Recipe, plan: Plan) -> float:
    return recipe.steps * plan.step.seconds / 3600


@dataclass
class _Search:
    recipe: Recipe
    cluster: Cluster
    hours: float | None
    progress: Progress
    tried: dict[ClusterSize, DeviceTry] = field(default_factory=dict)

    def plan(self, size: ClusterSize) -> Plan:
        asked = resized(self.recipe, self.cluster, size)
        devices = size[0] * size[1]
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

    def enough(self, size: ClusterSize) -> bool:
        if size not in self.tried:
            try:
                self.plan(size)
            except RecipeError as error:  # the pinned settings need more devices, say
                self.tried[size] = DeviceTry(size[0] * size[1], 0.0, None, f"not possible: {error.what}")
        return self.tried[size].verdict == "enough"
