"""Values that cost seconds once, at the start of a run, and save time in every step, such as compiled kernels.

The search (plan/choose.py) compares seconds of a step, so it leaves them out. They are tried on the best strategy.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.answer import SURE
from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Strategy
from shardwise.plan.predictor import Predictor
from shardwise.plan.quick import Quick, figures_in_proportion, quick_figures
from shardwise.technique import SETTINGS

_MOST = 0.15
"""Share of a step that such a value saves at most, for a bound."""


def with_one_time_costs(predictor: Predictor, best: Quick) -> Iterator[Strategy]:
    """Strategies to confirm, best first: with values that surely save more than they cost, and without.

    A recipe with epochs has no steps until its data is counted, so nothing is sure.
    """
    steps, objective = predictor.recipe.steps, predictor.recipe.plan.objective
    for setting in SETTINGS if steps and objective != "memory" else ():
        for value, cost in setting.once.items():
            least = SURE * cost / steps
            if setting.key in predictor.recipe.strategy or least >= _MOST * best.seconds:
                continue
            for strategy in predictor.possible([best.strategy.with_values(**{setting.key: value})]):
                try:
                    found = figures_in_proportion(predictor, strategy, best)
                    found = found or quick_figures(predictor, strategy, once=True)
                except RecipeError:  # the model refuses
                    continue
                if found.fits and found.seconds < best.seconds - least:
                    yield strategy
    yield best.strategy
