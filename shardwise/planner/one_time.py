"""Values that cost seconds once, at the start of a run, and save time in every step, such as compiled kernels.

The search (planner/choose.py) compares seconds of a step, so it leaves them out. They are tried on the best strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.core.answer import SURE
from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Setting, Strategy
from shardwise.planner.predictor import Predictor
from shardwise.planner.quick import Quick, figures_in_proportion, quick_figures
from shardwise.technique import SETTINGS

_MOST_SAVED = 0.15
"""Share of a step that such a value saves at most, for a bound."""


def load_packages(predictor: Predictor) -> None:
    """Load the packages that values with one-time costs need, so that processes that are forked later have them.

    Call it while a forked process does dry runs.
    """
    for setting in _one_time_settings(predictor):
        if setting.load is not None and predictor.composer is not None:
            setting.load()


def with_one_time_costs(predictor: Predictor, best: Quick) -> Iterator[Strategy]:
    """Strategies to confirm, best first: with values that surely save more than they cost, and without.

    A recipe with epochs has no steps until its data is counted, so nothing is sure.
    """
    for setting in _one_time_settings(predictor):
        for value, cost in setting.once.items():
            least = SURE * cost / (predictor.recipe.steps or math.inf)
            if least >= _MOST_SAVED * best.seconds:
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


def _one_time_settings(predictor: Predictor) -> Sequence[Setting[Any]]:
    """Settings with such values that the recipe leaves to the planner, where they can save anything."""
    recipe = predictor.recipe
    if not recipe.steps or recipe.plan.objective == "memory":
        return ()
    return [setting for setting in SETTINGS if setting.once and setting.key not in recipe.strategy]
