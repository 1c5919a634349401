"""The nearest plan that fits, when memory ran out although the plan said that it would not.

Then a device gives less than the plan took for granted: another process, a driver, a limit. How much it gives is
known from the rank that ran out, so other strategies are predicted as ever and compared with that. Nearest means
first what the planner may choose by itself, one setting changed, then two; then one more that it only compares (it
may change what is computed); of those with as many changes, the fastest. Predictions are quick ones: this is advice,
and the run that follows it is planned in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import combinations, product
from typing import Any

from shardwise.core.cluster import Cluster
from shardwise.core.errors import RecipeError
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Setting, Strategy
from shardwise.core.units import format_bytes
from shardwise.model.blueprint import Blueprint
from shardwise.plan.predict import Prediction, predict
from shardwise.technique import SETTINGS, broken_rules, native, one_line


def nearest_in_words(
    recipe: Recipe, blueprint: Blueprint, cluster: Cluster, strategy: Strategy, held_bytes: int
) -> str:
    """What to do about ``strategy``, which ran out when a rank held ``held_bytes`` (as a run's peak is measured)."""
    failed = predict(recipe, blueprint, strategy, cluster)
    # Beside what is measured the device holds what is only predicted; and less than all of it did not suffice.
    budget = min(failed.peak.bytes - 1, held_bytes + failed.peak.bytes - failed.allocated_bytes)
    least = failed
    for level in _levels(recipe, cluster, strategy):
        found = list(_predicted(recipe, blueprint, cluster, level))
        if fitting := [each for each in found if each.peak.bytes <= budget]:
            best = min(fitting, key=lambda each: each.step.seconds)
            changes = best.strategy.differences(strategy)
            keys = ", ".join(f"{key}={value[0]}" for key, value in changes.items())
            return f"the nearest plan that fits in {format_bytes(budget)}: {keys} ({format_bytes(best.peak.bytes)})"
        least = min([least, *found], key=lambda each: each.peak.bytes)
    line = one_line(least.strategy, least.layout, recipe.batch_size)
    return f"no plan fits in {format_bytes(budget)}; the least is {format_bytes(least.peak.bytes)}: {line}"


def _levels(recipe: Recipe, cluster: Cluster, strategy: Strategy) -> Iterator[list[Strategy]]:
    """Strategies that differ in one setting, in two, and in these and one more that is only compared."""
    free = [setting for setting in SETTINGS if setting.candidates]
    one = list(_changed(strategy, [(setting,) for setting in free]))
    two = list(_changed(strategy, combinations(free, 2)))
    shown = [(setting,) for setting in SETTINGS if setting.compared]
    for level in (one, two, [far for near in (strategy, *one, *two) for far in _changed(near, shown)]):
        yield [
            each
            for each in level
            if native(each, cluster.device) and not any(broken_rules(each, cluster.world_size, recipe))
        ]


def _changed(strategy: Strategy, groups: Iterable[tuple[Setting[Any], ...]]) -> Iterator[Strategy]:
    """The strategy with every setting of a group at another value, for each group and each of their values."""
    for group in groups:
        others = [[value for value in (*s.candidates, *s.compared) if value != strategy[s]] for s in group]
        for values in product(*others):
            yield strategy.with_values(**{s.key: value for s, value in zip(group, values, strict=True)})


def _predicted(
    recipe: Recipe, blueprint: Blueprint, cluster: Cluster, level: Iterable[Strategy]
) -> Iterator[Prediction]:
    for strategy in level:
        with suppress(RecipeError):  # what cannot be built here, for a package that is missing
            yield predict(recipe, blueprint, strategy, cluster, quick=True)
