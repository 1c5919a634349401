"""Compute-optimal training on a cluster: the search of ``shardwise.scaling`` with the planner's own plans."""

from __future__ import annotations

from dataclasses import asdict

from shardwise.core.plan import Plan
from shardwise.hardware.cluster import Cluster
from shardwise.jobs.planning import make_plan
from shardwise.recipe.presets import Dimensions
from shardwise.recipe.sections import ModelSpec, Recipe
from shardwise.scaling.budget import BudgetChoice, BudgetSearch, Limit
from shardwise.scaling.family import family_of, sizes
from shardwise.scaling.law import Law

_UTILISATION = 0.4
"""Share of the peak that is assumed until a size has been planned."""


def find_budget(
    recipe: Recipe, cluster: Cluster, limit: Limit, law: Law, served: float = 0.0
) -> BudgetChoice:
    """The size of the recipe's family with the lowest loss within the budget; loads torch.

    Args:
        served: tokens to serve later, for which a smaller model is trained longer to the same loss; 0 for none.

    Raises:
        RecipeError: the recipe's model is not a native decoder.
        ResourceError: no size fits the cluster.
    """

    def planned(dimensions: Dimensions) -> Plan:
        return make_plan(of_size(recipe, dimensions), cluster)

    rate = _UTILISATION * cluster.world_size * cluster.device.peak_flops("bf16")
    search = BudgetSearch(sizes(family_of(recipe.model)), limit, law, planned, rate)
    return search.best(served)


def of_size(recipe: Recipe, dimensions: Dimensions) -> Recipe:
    """The recipe with a model of these dimensions."""
    values = asdict(dimensions)
    values.pop("norm_epsilon")
    return recipe.model_copy(update={"model": ModelSpec(**values)})


def to_train(recipe: Recipe, budget: BudgetChoice) -> Recipe:
    """The recipe that trains the chosen size on its tokens.

    A warmup or decay in steps that is longer than half of the run becomes the schedule's default.
    """
    steps = max(1, round(budget.best.tokens / budget.plan.step.tokens))
    schedule = recipe.schedule
    for key in ("warmup", "decay"):
        length = getattr(schedule, key)
        if isinstance(length, int) and 2 * length > steps:
            default = type(schedule).model_fields[key].get_default()
            schedule = schedule.model_copy(update={key: default})
    sized = of_size(recipe, budget.best.dimensions)
    return sized.model_copy(update={"steps": steps, "schedule": schedule})
