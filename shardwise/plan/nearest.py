"""The nearest plan that fits, when memory ran out although the plan said that it would not.

Then a device gives less than the plan took for granted: another process, a driver, a limit. How much it gives is
known from the rank that ran out, so other strategies are predicted as ever and compared with that. Nearest means one
setting changed that the planner may choose by itself; else the smallest of these with one more; else the smallest so
far with one change that the planner only compares (it may change what is computed). Of several that fit it is the
fastest. Predictions are quick ones, and not all combinations are tried: this is advice, and a run that follows it is
planned in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from shardwise.core.cluster import Cluster
from shardwise.core.errors import RecipeError
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Setting, Strategy
from shardwise.core.units import format_bytes
from shardwise.model.blueprint import Blueprint
from shardwise.plan.predict import Prediction
from shardwise.plan.stages import predict_worst
from shardwise.technique import SETTINGS, broken_rules, native, one_line


def nearest_in_words(
    recipe: Recipe, blueprint: Blueprint, cluster: Cluster, strategy: Strategy, held_bytes: int
) -> str:
    """What to do about ``strategy``, which ran out when a rank held ``held_bytes`` (as a run's peak is measured)."""
    failed = predict_worst(recipe, blueprint, strategy, cluster)
    # Beside what is measured the device holds what is only predicted; and less than all of it did not suffice.
    budget = min(failed.peak.bytes - 1, held_bytes + failed.peak.bytes - failed.allocated_bytes)
    least, seen = failed, {strategy}
    free = [setting for setting in SETTINGS if setting.candidates]
    for settings in (free, free, [setting for setting in SETTINGS if setting.compared]):
        trials = [trial for trial in _changed(least.strategy, settings) if trial not in seen]
        seen.update(trials)
        found = list(_predicted(recipe, blueprint, cluster, trials))
        if fitting := [each for each in found if each.peak.bytes <= budget]:
            best = min(fitting, key=lambda each: each.step.seconds)
            keys = ", ".join(f"{key}={new}" for key, (new, _) in best.strategy.differences(strategy).items())
            return f"the nearest plan that fits in {format_bytes(budget)}: {keys} ({format_bytes(best.peak.bytes)})"
        least = min([least, *found], key=lambda each: each.peak.bytes)
    line = one_line(least.strategy, least.layout, recipe.batch_size)
    return f"no plan fits in {format_bytes(budget)}; the least is {format_bytes(least.peak.bytes)}: {line}"


def _changed(strategy: Strategy, settings: Iterable[Setting[Any]]) -> Iterator[Strategy]:
    """The strategy with one setting at another value."""
    for setting in settings:
        for value in (*setting.candidates, *setting.compared):
            yield strategy.with_values(**{setting.key: value})


def _predicted(
    recipe: Recipe, blueprint: Blueprint, cluster: Cluster, level: Iterable[Strategy]
) -> Iterator[Prediction]:
    for strategy in level:
        broken = any(broken_rules(strategy, cluster.world_size, recipe))
        if broken or not native(strategy, cluster.device):
            continue
        with suppress(RecipeError):  # what cannot be built here, for a package that is missing
            yield predict_worst(recipe, blueprint, strategy, cluster, quick=True)
