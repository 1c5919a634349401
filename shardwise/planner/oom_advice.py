"""Advice after an out-of-memory error although the plan said that the strategy fits: the nearest plan that does.

The device then has less free memory than planned: another process or a limit takes some. The failed rank tells how much
there is, so other strategies are predicted and compared with that. The nearest is searched in three rounds:

1. one changed setting that the planner may choose by itself;
2. the smallest strategy of round 1 with one more such change;
3. the smallest so far with one change that the planner only compares, because it may change the mathematics.

Of several that fit, the fastest is advised. Predictions are quick, and not all combinations are tried: a run that
follows the advice is planned in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Setting, Strategy
from shardwise.core.units import format_bytes
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint
from shardwise.planner.predictor import Predictor
from shardwise.planner.verdicts import Estimate
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_line


def nearest_in_words(
    recipe: Recipe, blueprint: Blueprint, cluster: Cluster, strategy: Strategy, held_bytes: int
) -> str:
    """The nearest strategy that fits, in a sentence.

    Args:
        strategy: the one that ran out of memory.
        held_bytes: what the failed rank had allocated, as a run's peak is measured.
    """
    predictor = Predictor(recipe, blueprint, cluster)
    failed = predictor.confirm(strategy)
    # Overhead and fragmentation are not measured but predicted. All of it together was not enough: hence the -1.
    budget = min(failed.peak.bytes - 1, held_bytes + failed.peak.bytes - failed.allocated_bytes)
    least = predictor.estimate(strategy)
    seen = {strategy}
    free = [setting for setting in SETTINGS if setting.candidates]
    # What --limits searches in steps is a load that the data demand: less room for it saves nothing.
    compared = [setting for setting in SETTINGS if setting.compared and not setting.step]
    for settings in (free, free, compared):
        trials = [trial for trial in _neighbour_strategies(least.strategy, settings) if trial not in seen]
        seen.update(trials)
        predictions = list(_quick_predictions(predictor, trials))
        if fitting := [prediction for prediction in predictions if prediction.bytes <= budget]:
            best = min(fitting, key=lambda prediction: prediction.seconds)
            keys = ", ".join(f"{key}={new}" for key, (new, _) in best.strategy.differences(strategy).items())
            return (
                f"the nearest plan that fits in {format_bytes(budget)}: {keys} ({format_bytes(best.bytes)})"
            )
        least = min([least, *predictions], key=lambda prediction: prediction.bytes)
    line = strategy_line(least.strategy, predictor.layout(least.strategy), recipe.batch_size)
    return f"no plan fits in {format_bytes(budget)}; the smallest needs {format_bytes(least.bytes)}: {line}"


def _neighbour_strategies(strategy: Strategy, settings: Iterable[Setting[Any]]) -> Iterator[Strategy]:
    """The strategy with one setting at another value."""
    for setting in settings:
        for value in (*setting.candidates, *setting.compared):
            yield strategy.with_values(**{setting.key: value})


def _quick_predictions(predictor: Predictor, strategies: Iterable[Strategy]) -> Iterator[Estimate]:
    """Quick predictions of those that can be built on this machine and device."""
    for strategy in predictor.possible(strategies):
        with suppress(RecipeError):  # a package is missing
            yield predictor.estimate(strategy)
