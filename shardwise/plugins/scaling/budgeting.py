"""Compute-optimal training on a cluster: the search of ``shardwise.scaling`` with the planner's own plans."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from shardwise.core.errors import DataError, RecipeError
from shardwise.core.plan import Plan
from shardwise.core.progress import Progress, silent
from shardwise.hardware.cluster import Cluster
from shardwise.jobs.planning import make_plan
from shardwise.plugins.scaling.budget import BudgetChoice, BudgetSearch, Limit
from shardwise.plugins.scaling.family import family_of, family_sizes
from shardwise.plugins.scaling.law import Law
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.noise_scale import NoiseScale, noise_scale
from shardwise.recipe.section import MOST_STEPS
from shardwise.recipe.sections import ModelSpec, Recipe
from shardwise.report.record import read_run

_UTILISATION = 0.4
"""Share of the peak that is assumed until a size has been planned."""


def find_budget(
    recipe: Recipe,
    cluster: Cluster,
    limit: Limit,
    law: Law,
    served: float = 0.0,
    progress: Progress = silent,
) -> BudgetChoice:
    """The size of the recipe's family with the lowest loss within the budget; loads torch.

    Args:
        served: tokens to serve later, for which a smaller model is trained longer to the same loss; 0 for none.
        progress: gets a line for every size that is planned.

    Raises:
        RecipeError: the recipe's model is not a native decoder, or the tokens are more than a recipe's steps may have.
        ResourceError: no size fits the cluster.
    """
    per_step = recipe.batch_size * recipe.data.sequence_length
    if limit.kind == "tokens":  # the steps are known now: refuse too many before seconds of planning
        _steps(limit.amount, per_step)

    def planned(dimensions: Dimensions, tokens: float) -> Plan:
        size = f"{dimensions.layers} layers of width {dimensions.width:,}"
        progress(f"planning {size}")
        # What costs seconds once, such as compiling, pays in a run of this length or does not.
        steps = max(1, round(tokens / per_step))
        return make_plan(of_size(recipe, dimensions).model_copy(update={"steps": steps}), cluster)

    rate = _UTILISATION * cluster.world_size * cluster.device.peak_flops("bf16")
    search = BudgetSearch(family_sizes(family_of(recipe.model)), limit, law, planned, rate)
    return search.best(served)


def _steps(tokens: float, per_step: int) -> int:
    """The steps of a run. Raises RecipeError for more than a recipe may have."""
    steps = max(1, round(tokens / per_step))
    if steps > MOST_STEPS:
        raise RecipeError(
            f"the run would take {steps:,.5g} steps, of {MOST_STEPS:,} at most",
            where="batch_size",
            why=f"a step has {per_step:,} tokens",
            fix="raise batch_size, or lower the budget",
        )
    return steps


def of_size(recipe: Recipe, dimensions: Dimensions) -> Recipe:
    """The recipe with a model of these dimensions."""
    values = asdict(dimensions)
    values.pop("norm_epsilon")  # no key of a recipe
    return recipe.model_copy(update={"model": ModelSpec(**values)})


def noise_of_run(folder: Path) -> tuple[NoiseScale, float]:
    """The gradient noise scale that a run has measured, and how many of the positions of its batches were targets.

    It depends on the loss more than on the model's size (McCandlish et al. 2018, section 3), so a small run of the same
    data advises a large one until its loss is reached.

    Raises:
        DataError: the folder is no run's, or the run has not measured its noise.
    """
    run = read_run(folder)
    measured = [step.gradient_noise for step in run.steps if step.gradient_noise is not None]
    noise = noise_scale(measured)
    if noise is None:
        why = "noise hides the gradient in its measurements" if measured else "the run has not measured it"
        fix = "train with evaluation.noise_scale=true and evaluation.every"
        raise DataError("no gradient noise scale", where=str(folder), why=why, fix=fix)
    return noise, noise.batch_tokens / run.plan.step.tokens


def to_train(recipe: Recipe, budget: BudgetChoice) -> Recipe:
    """The recipe that trains the chosen size on its tokens.

    A warmup or decay in steps that is longer than half of the run becomes the schedule's default.

    Raises:
        RecipeError: it would take more steps than a recipe may have.
    """
    steps = _steps(budget.best.tokens, budget.plan.step.tokens)
    schedule = recipe.schedule
    for key in ("warmup", "decay"):
        length = getattr(schedule, key)
        if isinstance(length, int) and 2 * length > steps:
            default = type(schedule).model_fields[key].get_default()
            schedule = schedule.model_copy(update={key: default})
    sized = of_size(recipe, budget.best.dimensions)
    return sized.model_copy(update={"steps": steps, "schedule": schedule})
