"""Learning-rate scaling: the optimizer's values for this batch size, derived from values tuned for another.

``optimizer.scale_learning_rate: {from_batch, rule}`` gives the batch size for which the values were tuned. With
k = batch_size / from_batch the rules are

    linear   learning rate × k. For SGD with a gradual warmup (Goyal et al. 2017, arXiv 1706.02677): k small
             steps along one gradient equal one step k times as long.
    sqrt     learning rate × √k; for Adam also 1 - beta → k (1 - beta) for both betas, and epsilon → epsilon / √k
             (Malladi et al. 2022, arXiv 2205.10287): the moving averages decay as fast per sample as before.

The trainer, the reference, the dry run and the plan call the same function; the recipe keeps the unscaled values. The
user chooses the rule: a rule that does not suit the optimizer leads to advice, not to an error. Where k (1 - beta)
reaches 1 there is no moving average; the error then names the largest batch size that works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from shardwise.core.errors import RecipeError
from shardwise.recipe.sections import OptimizerSpec, Recipe


def scaled(recipe: Recipe) -> OptimizerSpec:
    """The optimizer's scaled values. Raises RecipeError if the rule has no solution for this batch size."""
    spec = recipe.optimizer
    if spec.scale_learning_rate is None:
        return spec
    k, rule = batch_ratio(recipe), spec.scale_learning_rate.rule
    root = math.sqrt(k)
    values: dict[str, object] = {
        "learning_rate": spec.learning_rate * (float(k) if rule == "linear" else root),
        "scale_learning_rate": None,
    }
    if rule == "sqrt" and _adaptive(spec):
        values["betas"] = tuple(_beta(beta, recipe) for beta in spec.betas)
        values["epsilon"] = spec.epsilon / root
    return spec.model_copy(update=values)


def batch_ratio(recipe: Recipe) -> Fraction:
    """k = batch_size / from_batch; 1 without a rule."""
    scaling = recipe.optimizer.scale_learning_rate
    return Fraction(recipe.batch_size, scaling.from_batch if scaling else recipe.batch_size)


def sentences(recipe: Recipe) -> Iterator[str]:
    """The scaled values and advice on the rule, in sentences; none without a rule."""
    spec, scaling = recipe.optimizer, recipe.optimizer.scale_learning_rate
    if scaling is None:
        return
    now, factor = scaled(recipe), f"{float(batch_ratio(recipe)):g}"
    factor = factor if scaling.rule == "linear" else f"√{factor}"
    said = [
        f"learning rate {_short(spec.learning_rate)} × {factor} = {_short(now.learning_rate)}"
        f" ({scaling.rule}, batch {recipe.batch_size} from {scaling.from_batch})"
    ]
    if now.betas != spec.betas:
        said.append(f"betas {_pair(spec.betas)} → {_pair(now.betas)}")
    if now.epsilon != spec.epsilon:
        said.append(f"epsilon {_short(spec.epsilon)} → {_short(now.epsilon)}")
    yield "; ".join(said)
    yield from _advice(recipe)


def _advice(recipe: Recipe) -> Iterator[str]:
    spec, scaling = recipe.optimizer, recipe.optimizer.scale_learning_rate
    if scaling is not None and scaling.rule == "linear" and _adaptive(spec):
        yield (
            f"advice: the linear rule is for SGD; for {spec.name} use rule: sqrt"
            " (Malladi et al. 2022, arXiv 2205.10287)"
        )
    if scaling is not None and scaling.rule == "sqrt" and not _adaptive(spec):
        yield (
            f"advice: the square-root rule is for Adam; for {spec.name} use rule: linear"
            " (Goyal et al. 2017, arXiv 1706.02677)"
        )
    if batch_ratio(recipe) > 1 and recipe.schedule.warmup == 0:
        yield "advice: use a gradual warmup with a learning rate that was scaled up; set schedule.warmup"


def _adaptive(spec: OptimizerSpec) -> bool:
    """Whether the update is normalised by the gradient's magnitude."""
    return spec.factory is None and spec.name.startswith("adam")


def _beta(beta: float, recipe: Recipe) -> float:
    """The beta with the same decay per sample, computed in fractions: 0.9 is nine tenths."""
    forgets = 1 - Fraction(repr(beta))
    k = batch_ratio(recipe)
    if k * forgets >= 1:
        start = recipe.batch_size / k
        raise RecipeError(
            f"the square-root rule does not work for batch_size {recipe.batch_size}",
            where="optimizer.scale_learning_rate",
            why=f"k (1 - beta) is {float(k * forgets):g} for k = {float(k):g} and beta = {beta:g}; it must be below 1",
            fix=f"the largest batch_size that works is {math.ceil(start / forgets) - 1}",
        )
    return float(1 - k * forgets)


def _short(number: float) -> str:
    return f"{number:.4g}"


def _pair(betas: tuple[float, float]) -> str:
    return "[" + ", ".join(f"{beta:.6g}" for beta in betas) + "]"
