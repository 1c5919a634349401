"""The nearest plan that fits, when memory ran out although the plan said that it would not.

Then a device gives less than the plan took for granted: another process, a driver, a limit. How much it gives is
known from the rank that ran out, so other strategies are predicted as ever and compared with that. Nearest means
first what the planner may choose by itself, one setting changed, then two; then the smallest of these with one more
change that the planner only compares (it may change what is computed). Of several with as many changes it is the
fastest. Predictions are quick ones: this is advice, and the run that follows it is planned in full.
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
    least, free = failed, [setting for setting in SETTINGS if setting.candidates]
    shown = [(setting,) for setting in SETTINGS if setting.compared]
    for groups in ([(setting,) for setting in free], list(combinations(free, 2)), shown):
        near = least.strategy if groups is shown else strategy
        found = list(_predicted(recipe, blueprint, cluster, _changed(near, groups)))
        if fitting := [each for each in found if each.peak.bytes <= budget]:
            best = min(fitting, key=lambda each: each.step.seconds)
            keys = ", ".join(f"{key}={new}" for key, (new, _) in best.strategy.differences(strategy).items())
            return f"the nearest plan that fits in {format_bytes(budget)}: {keys} ({format_bytes(best.peak.bytes)})"
        least = min([least, *found], key=lambda each: each.peak.bytes)
    line = one_line(least.strategy, least.layout, recipe.batch_size)
    return f"no plan fits in {format_bytes(budget)}; the least is {format_bytes(least.peak.bytes)}: {line}"


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
        broken = any(broken_rules(strategy, cluster.world_size, recipe))
        if broken or not native(strategy, cluster.device):
            continue
        with suppress(RecipeError):  # what cannot be built here, for a package that is missing
            yield predict(recipe, blueprint, strategy, cluster, quick=True)
