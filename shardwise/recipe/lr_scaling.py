"""Learning-rate scaling: the optimizer's values for this batch size, derived from values tuned for another.

``optimizer.scale_learning_rate: {from_batch, rule}`` gives the batch size for which the values were tuned. With
k = batch_size / from_batch the rules are

    linear   learning rate × k. For SGD with a gradual warmup (Goyal et al. 2017, arXiv 1706.02677): k small
             steps along one gradient equal one step k times as long.
    sqrt     learning rate × √k; for Adam also 1 - beta → k (1 - beta) for both betas, and epsilon → epsilon / √k
             (Malladi et al. 2022, arXiv 2205.10287): the moving averages decay as fast per sample as before.

The trainer, the reference, the dry run and the plan call the same function; the recipe keeps the unscaled values. Of a
library's optimizer all groups are scaled alike. Its betas and epsilon are scaled if it is an Adam of torch. The user
chooses the rule: a rule that does not suit the optimizer leads to advice, not to an error. Where k (1 - beta)
reaches 1 there is no moving average; the error then names the largest batch size that works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal

from shardwise.core.errors import RecipeError
from shardwise.recipe.optimizer_factory import (
    AdamDecay,
    adam_decay,
    is_adaptive,
    optimizer_label,
    with_adam_decay,
)
from shardwise.recipe.sections import OptimizerSpec, Recipe


def scaled(recipe: Recipe) -> OptimizerSpec:
    """The optimizer's scaled values. Raises RecipeError if the rule has no solution for this batch size."""
    spec = recipe.optimizer
    if spec.scale_learning_rate is None:
        return spec
    k = batch_ratio(recipe)
    rule = spec.scale_learning_rate.rule
    root = math.sqrt(k)
    values: dict[str, object] = {
        "learning_rate": spec.learning_rate * (float(k) if rule == "linear" else root),
        "scale_learning_rate": None,
    }
    decay = adam_decay(spec) if rule == "sqrt" else None
    if decay is not None:
        betas = tuple(_beta(beta, recipe) for beta in decay.betas)
        spec = with_adam_decay(spec, AdamDecay(betas, decay.epsilon / root))
    return spec.model_copy(update=values)


def built(recipe: Recipe) -> OptimizerSpec:
    """The values that an optimizer is built with: scaled, but for the learning rate, which is set before every step.

    A factory may choose rates of its own for its groups. The groups keep their ratios to the rate of the recipe.
    """
    return scaled(recipe).model_copy(update={"learning_rate": recipe.optimizer.learning_rate})


def batch_ratio(recipe: Recipe) -> Fraction:
    """k = batch_size / from_batch; 1 without a rule."""
    scaling = recipe.optimizer.scale_learning_rate
    return Fraction(recipe.batch_size, scaling.from_batch if scaling else recipe.batch_size)


def scaling_sentences(recipe: Recipe) -> Iterator[str]:
    """The scaled values and advice on the rule, in sentences; none without a rule."""
    spec = recipe.optimizer
    scaling = recipe.optimizer.scale_learning_rate
    if scaling is None:
        return
    now = scaled(recipe)
    factor = f"{float(batch_ratio(recipe)):g}"
    factor = factor if scaling.rule == "linear" else f"√{factor}"
    said = [
        f"learning rate {_brief(spec.learning_rate)} × {factor} = {_brief(now.learning_rate)}"
        f" ({scaling.rule}, batch {recipe.batch_size} from {scaling.from_batch})"
    ]
    before, after = adam_decay(spec), adam_decay(now)
    if before is not None and after is not None and before != after:
        said.append(f"betas {_betas_text(before.betas)} → {_betas_text(after.betas)}")
        said.append(f"epsilon {_brief(before.epsilon)} → {_brief(after.epsilon)}")
    yield "; ".join(said)
    yield from _advice(recipe, scaling.rule)


def _advice(recipe: Recipe, rule: Literal["linear", "sqrt"]) -> Iterator[str]:
    spec = recipe.optimizer
    ratio = batch_ratio(recipe)
    adaptive = is_adaptive(spec)
    if adaptive is None:
        yield (
            f"advice: {optimizer_label(spec)} could not be tried;"
            " rule: sqrt is for Adam and its kin, rule: linear for SGD"
        )
    elif rule == "linear" and adaptive:
        yield (
            f"advice: the linear rule is for SGD; for {optimizer_label(spec)} use rule: sqrt"
            " (Malladi et al. 2022, arXiv 2205.10287)"
        )
    elif rule == "sqrt" and not adaptive:
        yield (
            f"advice: the square-root rule is for Adam; for {optimizer_label(spec)} use rule: linear"
            " (Goyal et al. 2017, arXiv 1706.02677)"
        )
    elif rule == "sqrt" and ratio != 1 and adam_decay(spec) is None:
        yield (
            "advice: the square-root rule scales decay rates and epsilon too;"
            f" those of {optimizer_label(spec)} are unchanged"
        )
    if ratio > 1 and recipe.schedule.warmup == 0:
        yield "advice: use a gradual warmup with a learning rate that was scaled up; set schedule.warmup"


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


def _brief(number: float) -> str:
    return f"{number:.4g}"


def _betas_text(betas: Sequence[float]) -> str:
    return "[" + ", ".join(f"{beta:.6g}" for beta in betas) + "]"
