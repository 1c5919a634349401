"""Values that cost seconds once, at the start of a run, and save time in every step, such as compiled kernels.

The search (planner/choose.py) compares seconds of a step, so it leaves them out. They are tried on the best strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.core.answer import SURE
from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Strategy
from shardwise.planner.predictor import Predictor
from shardwise.planner.verdicts import Estimate
from shardwise.technique import SETTINGS, has_stages, without_stages

_MOST_SAVED = 0.15
"""Share of a step that a value with a one-time cost, such as compiled kernels, saves at most, for a bound."""


def with_one_time_costs(predictor: Predictor, best: Estimate) -> Iterator[tuple[Strategy, float]]:
    """Strategies to confirm, best first, each with the most seconds of a step at which it is worth its cost.

    It has to save surely more than it costs. A recipe with epochs has no steps until its data is counted, so nothing
    is sure.
    """
    recipe = predictor.recipe
    for setting in SETTINGS if recipe.steps and not predictor.by_memory else ():
        for value, cost in () if setting.key in recipe.strategy else setting.once.items():
            least = SURE * cost / recipe.steps
            if least >= _MOST_SAVED * best.seconds:
                continue
            for strategy in predictor.possible([best.strategy.with_values(**{setting.key: value})]):
                if best.seconds * (1 - _share_of_seconds(predictor, strategy, best)) > least:
                    yield strategy, best.seconds - least
    yield best.strategy, math.inf


def _share_of_seconds(predictor: Predictor, strategy: Strategy, best: Estimate) -> float:
    """Seconds of a strategy with pipeline stages over those of the best, both without their stages; 0 without stages,
    where a dry run of the whole step takes no longer than to find out."""
    if not has_stages(predictor.layout(strategy)):
        return 0.0
    try:
        one, two = (predictor.estimate(without_stages(s), alone=True) for s in (strategy, best.strategy))
    except RecipeError:  # the model refuses
        return math.inf
    return one.seconds / two.seconds
