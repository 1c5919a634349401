"""The points of the page, in the order in which they are predicted: the plan's own, then one and two changes of it.

Points that differ in the device alone are one *group*: they share a dry run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Setting, Strategy
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.plugins.explorer.controls import STRATEGY, Control, Workload, Workloads, extra, values_next_to
from shardwise.recipe.sections import Recipe
from shardwise.technique import DIGITS, MICRO_BATCH_SIZE, ORDER, SETTINGS, broken_rules, layout_of, setting_of

Change = Mapping[str, Any]
"""Values of controls, by key, that differ from the plan's."""

MAX_PAGE_POINTS = 6000
"""Of a page, which then has 2 MB."""

_RARE, _ROUNDING, _OTHERS = 2, 1, 1
"""By how much later a change is predicted if no plan chooses it, if it changes the digits of the training, or, of two,
if one changes the workload."""


@dataclass(frozen=True)
class PointGroup:
    """A strategy and a workload, whose device is left open."""

    workload: Workload
    strategy: Strategy


@dataclass(frozen=True)
class PointGrid:
    """All groups around a strategy of a workload."""

    workloads: Workloads
    strategy: Strategy
    controls: Sequence[Control]

    def groups(self) -> Iterator[PointGroup]:
        """Each once, the most useful first."""
        own = PointGroup(self.workloads.own, self.strategy)
        most = MAX_PAGE_POINTS // len(self.controls[0].values)
        seen = {own}
        yield own
        for change in self._changes():
            group = self.changed(change)
            if group is not None and group not in seen:
                seen.add(group)
                yield group
                if len(seen) >= most:
                    return

    def changed(self, change: Change) -> PointGroup | None:
        """The group with these values. Settings that they decide take the value that the planner would choose first.

        None where a setting does nothing next to the others, such as the schedule of no pipeline, and where a
        micro-batch is larger than a rank's share of the batch.
        """
        own = self.workloads.own
        strategy = self._plain
        workload = replace(own, **{key: v for key, v in change.items() if not key.startswith(STRATEGY)})
        named = {
            key.removeprefix(STRATEGY): value for key, value in change.items() if key.startswith(STRATEGY)
        }
        strategy = strategy.with_values(**named)
        try:
            recipe = self.workloads.recipe_of(workload)
            cluster = cluster_of(recipe.cluster)
        except RecipeError:
            return PointGroup(workload, strategy)
        strategy = self._settled(strategy, named, recipe, cluster)
        if any(broken_rules(strategy, cluster.world_size, recipe)):
            return PointGroup(workload, strategy)
        if any(self._idle(setting_of(key), strategy, recipe, cluster) for key in named):
            return None
        share = -(-recipe.batch_size // layout_of(strategy, cluster.world_size).data_degree)
        if strategy[MICRO_BATCH_SIZE] > share:
            if MICRO_BATCH_SIZE.key in named:
                return None
            strategy = strategy.with_values(**{MICRO_BATCH_SIZE.key: share})
        return PointGroup(workload, strategy)

    @property
    def _plain(self) -> Strategy:
        """The strategy without what costs seconds once, such as compiled kernels: their dry runs take longer."""
        once = {
            setting.key: setting.default for setting in SETTINGS if self.strategy[setting] in setting.once
        }
        return self.strategy.with_values(**once)

    def _settled(self, strategy: Strategy, named: Change, recipe: Recipe, cluster: Cluster) -> Strategy:
        for technique in ORDER:
            for setting in technique.settings:
                if setting.key in named or setting.key in DIGITS:
                    continue
                before = self._natural(setting, self.strategy, self.workloads.recipe, self.workloads.cluster)
                after = self._natural(setting, strategy, recipe, cluster)
                if strategy[setting] in before and strategy[setting] not in after:
                    strategy = strategy.with_values(**{setting.key: after[0]})
        return strategy

    def _idle(self, setting: Setting[Any], strategy: Strategy, recipe: Recipe, cluster: Cluster) -> bool:
        if setting is MICRO_BATCH_SIZE:
            return False
        listed = (setting.default, *extra(setting), *values_next_to(setting, strategy, recipe, cluster))
        return strategy[setting] not in listed

    def _natural(
        self, setting: Setting[Any], strategy: Strategy, recipe: Recipe, cluster: Cluster
    ) -> Sequence[object]:
        return values_next_to(setting, strategy, recipe, cluster) or (setting.default,)

    # -- the order of changes -----------------------------------------------------------------------

    def _changes(self) -> Iterator[Change]:
        """Single changes, the nearest values first; then pairs, by how near both are, of settings before others."""
        single = sorted(self._single_changes(), key=lambda ranked: ranked[0])
        yield {}
        yield from (change for _, change in single)
        pairs = [
            (one + other + _of_workload(first, second), {**first, **second})
            for (one, first), (other, second) in itertools.combinations([*single, *self._dependent()], 2)
            if not first.keys() & second.keys()
        ]
        yield from (change for _, change in sorted(pairs, key=lambda ranked: ranked[0]))

    def _single_changes(self) -> Iterator[tuple[int, Change]]:
        for control in self.controls:
            if control.key == "device":  # all are in one group
                continue
            for value, rank in self._ranked(control):
                late = self._lateness(control, value)
                if late is not None:
                    yield rank + late, {control.key: value}

    def _dependent(self) -> Iterator[tuple[int, Change]]:
        """Values of settings that do something only next to another change."""
        for control in self.controls:
            for value, rank in self._ranked(control):
                if self._lateness(control, value) is None:
                    yield rank, {control.key: value}

    def _ranked(self, control: Control) -> Iterator[tuple[Any, int]]:
        """Values other than the plan's, with how many are nearer to it."""
        own = asdict(self.workloads.own)
        mine = self._plain.values[control.setting] if control.setting else own[control.key]
        at = control.values.index(mine) if mine in control.values else 0
        near = sorted(range(len(control.values)), key=lambda index: abs(index - at))
        yield from ((control.values[index], rank) for rank, index in enumerate(near) if index != at)

    def _lateness(self, control: Control, value: Any) -> int | None:
        """By how much later a change is predicted; None where it does nothing next to the plan's other settings."""
        if control.setting in ("", MICRO_BATCH_SIZE.key):
            return 0
        setting = setting_of(control.setting)
        few = values_next_to(setting, self._plain, self.workloads.recipe, self.workloads.cluster)
        if setting.key in DIGITS:
            return _ROUNDING
        return 0 if value in few else _RARE if few or value in extra(setting) else None


def _of_workload(first: Change, second: Change) -> int:
    return sum(_OTHERS for key in (*first, *second) if not key.startswith(STRATEGY))
