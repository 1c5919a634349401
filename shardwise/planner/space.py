"""The strategies that the planner may choose for a recipe on a cluster, as the techniques declare them.

Techniques are asked in the order in which they are applied, so each sees what those before it chose: a schedule has
candidates only where ranks hold different blocks, stages of ZeRO only where ranks share the weights. Settings that the
recipe pins stay. A combination that breaks a rule is left out.

The space has two levels. An *origin* has values for the settings that change what all parts of a step hold (mesh axes,
precision). Its *completions* choose the others, which act on one part each (planner/compose.py): where the states are,
which activations are recomputed or offloaded, the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from shardwise.core.strategy import Setting, Strategy
from shardwise.hardware.cluster import Cluster
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    AXES,
    MICRO_BATCH_SIZE,
    ORDER,
    PARTS,
    STATES,
    Technique,
    broken_rules,
    case_of,
    layout_of,
    native,
    strategy_from,
    within,
)

Mesh = tuple[int, ...]
"""Degrees of the axes that do not divide the data."""


@dataclass(frozen=True)
class Space:
    """All strategies without their micro-batch sizes.

    Attributes:
        last_resort: also values that are tried where nothing else fits, or where they may save much.
    """

    recipe: Recipe
    cluster: Cluster
    last_resort: bool = False

    def meshes(self) -> Mapping[Mesh, Sequence[Strategy]]:
        """Origins by mesh, in the order of their settings' candidates."""
        meshes: dict[Mesh, list[Strategy]] = {}
        for origin in self._extended(strategy_from(self.recipe.strategy), of_parts=False):
            meshes.setdefault(self.mesh_of(origin), []).append(origin)
        return meshes

    def completions(self, origin: Strategy) -> Iterator[Strategy]:
        """Strategies with the origin's mesh that break no rule, plainest first."""
        for strategy in self._extended(origin, of_parts=True):
            if not any(broken_rules(strategy, self.cluster.world_size, self.recipe)):
                yield strategy

    def origin_of(self, strategy: Strategy) -> Strategy:
        """The strategy with the settings of parts at their defaults, but for those that the recipe pins."""
        return strategy.with_values(
            **{s.key: s.default for s in (*self._free(of_parts=True), MICRO_BATCH_SIZE)}
        )

    def last_resorts(self, strategy: Strategy) -> Mapping[str, Sequence[object]]:
        """Values of the last resort of every setting, where the strategy has the values of the others."""
        case = case_of(strategy, self.cluster.world_size, self.recipe, self.cluster.devices_per_node)
        return {s.key: technique.last_resort(s, case) for technique in ORDER for s in technique.settings}

    def mesh_of(self, strategy: Strategy) -> Mesh:
        layout = layout_of(strategy, self.cluster.world_size)
        return tuple(layout.degree(axis.name) for axis in AXES if axis.divides_model)

    def children(self, mesh: Mesh, meshes: Mapping[Mesh, object]) -> Iterator[Mesh]:
        """Meshes with one larger degree, by the smallest factor that there is.

        Ranks of an axis that divides one kind of layers, such as experts, keep their samples. Within a node such an
        axis does not change what the network carries, and a small degree saves little. So it starts with the largest
        degree there, and smaller ones follow it.
        """
        node = self.cluster.devices_per_node
        axes = [axis for axis in AXES if axis.divides_model]
        for at, degree in enumerate(mesh):
            others = {o[at]: o for o in meshes if o[:at] + o[at + 1 :] == mesh[:at] + mesh[at + 1 :]}
            larger = [other for other in others if other > degree and other % degree == 0]
            within = [other for other in larger if axes[at].samples and degree == 1 and other <= node]
            smaller = [other for other in others if axes[at].samples and 1 < other < degree <= node]
            following = [max(within) if within else min(larger)] if larger else []
            yield from (others[other] for other in (*following, *([max(smaller)] if smaller else [])))

    def divides_some_layers(self, strategy: Strategy) -> bool:
        """Whether ranks with samples of their own share the work of some layers, such as experts."""
        layout = layout_of(strategy, self.cluster.world_size)
        return any(axis.samples and layout.degree(axis.name) > 1 for axis in AXES if axis.divides_model)

    def moved(self, strategy: Strategy, origin: Strategy) -> Strategy:
        """The completion of an origin with the values of another origin's completion."""
        return origin.with_values(**{s.key: strategy[s] for s in self._free(of_parts=True)})

    def plainer(self, one: Strategy, other: Strategy) -> bool:
        """Whether no ordered setting of ``one`` has a later candidate, and all other free ones are equal."""
        for setting in self._free(of_parts=True):
            values = self._listed(setting)
            mine, theirs = one[setting], other[setting]
            if mine != theirs and not (
                setting.ordered and {mine, theirs} <= {*values} and values.index(mine) <= values.index(theirs)
            ):
                return False
        return True

    def _extended(self, start: Strategy, of_parts: bool) -> Iterator[Strategy]:
        """Every choice of the settings of parts, or of the others."""
        strategies = [start]
        for technique in ORDER:
            for setting in technique.settings:
                if setting in self._free(of_parts):
                    strategies = [one for s in strategies for one in self._choices(technique, setting, s)]
        yield from strategies

    def _choices(self, technique: Technique, setting: Setting[Any], strategy: Strategy) -> Iterator[Strategy]:
        case = case_of(strategy, self.cluster.world_size, self.recipe, self.cluster.devices_per_node)
        values = list(technique.candidates(setting, case)) or [strategy[setting]]
        if self.last_resort:
            values += technique.last_resort(setting, case)
        chosen = [strategy.with_values(**{setting.key: value}) for value in dict.fromkeys(values)]
        allowed = [one for one in chosen if self._can_be(setting, one)]
        # Where a rule of another technique forbids all candidates, the setting stays as it is.
        yield from allowed or filter(partial(self._can_be, setting), [strategy])

    def _can_be(self, setting: Setting[Any], strategy: Strategy) -> bool:
        known = native(strategy, self.cluster.device, self.recipe.strategy)
        return known and self._allowed(setting, strategy)

    def _allowed(self, setting: Setting[Any], strategy: Strategy) -> bool:
        """Whether no rule that names this setting is broken; rules of others may be mended by later ones."""
        size = self.cluster.world_size
        return not any(broken.rule.key == setting.key for broken in broken_rules(strategy, size, self.recipe))

    def _free(self, of_parts: bool) -> Sequence[Setting[Any]]:
        return self._free_settings[of_parts]

    @cached_property
    def _free_settings(self) -> Mapping[bool, Sequence[Setting[Any]]]:
        """Settings that the recipe does not pin: those of parts, and the others."""
        settings: dict[bool, list[Setting[Any]]] = {True: [], False: []}
        for technique in ORDER:
            for setting in technique.settings:
                if setting.key not in self.recipe.strategy and setting is not MICRO_BATCH_SIZE:
                    settings[_of_a_part(technique, setting)].append(setting)
        return settings

    def _listed(self, setting: Setting[Any]) -> Sequence[object]:
        return tuple(dict.fromkeys((setting.default, *setting.candidates, *setting.last_resort)))


def _of_a_part(technique: Technique, setting: Setting[Any]) -> bool:
    """Whether a setting is at its default in every origin."""
    other = next((v for v in setting.examples if v != setting.default), None)
    if other is None:
        return bool(technique.part)
    strategy = strategy_from({setting.key: other})
    return within(strategy, None)[setting] == setting.default


def blocks_and_loss(strategy: Strategy) -> tuple[Strategy, ...]:
    """What the strategy sets of the parts of a step, but for the states."""
    return tuple(within(strategy, part) for part in PARTS if part != STATES)
