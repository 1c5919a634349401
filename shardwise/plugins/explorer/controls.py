"""What one changes on the page: devices, sequence length, batch, training, and the settings of the techniques.

A *workload* is the training and its devices, without a strategy. A *choice* is a value of every control.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Setting, Strategy
from shardwise.hardware.cluster import Cluster, cluster_of, device_profile
from shardwise.hardware.profiles import PROFILES
from shardwise.model.blueprint import Blueprint
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import read_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, ORDER, SETTINGS, broken_rules, candidates_of, case_of

STRATEGY = "strategy."

TRAININGS: Mapping[str, Sequence[str]] = {
    "full": ("adapter=null",),
    "LoRA": ("adapter.name=lora", "adapter.quantize=none"),
    "QLoRA": ("adapter.name=lora", "adapter.quantize=nf4"),
}
"""Overrides of a recipe that is trained in another way."""

TIMES = (0.25, 0.5, 1, 2, 4)
"""Of the recipe's own sequence length, micro-batch and number of devices; of its batch those within 0.5 and 2."""


@dataclass(frozen=True)
class Workload:
    """The training and its devices, without a strategy."""

    device: str
    devices: int
    sequence: int
    batch: int
    training: str

    @property
    def recipe_key(self) -> tuple[int, int, str]:
        """All that decides the recipe but for its cluster."""
        return self.sequence, self.batch, self.training


@dataclass(frozen=True)
class Control:
    """One control of the page.

    Attributes:
        key: a field of Workload, or the key of a setting after STRATEGY.
        values: in the order in which they are shown.
    """

    key: str
    title: str
    values: tuple[Any, ...]

    @property
    def setting(self) -> str:
        """The key of its setting; "" if it is of the workload."""
        return self.key.removeprefix(STRATEGY) if self.key.startswith(STRATEGY) else ""

    def labels(self) -> list[str]:
        """The values as the page shows them."""
        return [_label(value) for value in self.values]


def _label(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


class Workloads:
    """The recipe of every workload: the file's own, read anew with the overrides that make the difference."""

    def __init__(self, file: Path, overrides: Sequence[str]) -> None:
        """Raises RecipeError."""
        self._file = file
        self._overrides = tuple(overrides)
        self.recipe = read_recipe(file, self._overrides, SETTINGS)[0]
        self.cluster = cluster_of(self.recipe.cluster)
        self.own = workload_of(self.recipe, self.cluster)
        self._known: dict[tuple[int, int, str], Recipe | RecipeError] = {}
        self._blueprints: dict[tuple[int, int, str], Blueprint] = {}

    def recipe_of(self, workload: Workload) -> Recipe:
        """The recipe of a workload, which trains on as many tokens as the file's own. Raises RecipeError."""
        asked = workload.recipe_key
        if asked not in self._known:
            try:
                changes = list(self._changes(workload))
                self._known[asked] = read_recipe(self._file, [*self._overrides, *changes], SETTINGS)[0]
            except RecipeError as error:
                self._known[asked] = error
        recipe = self._known[asked]
        if isinstance(recipe, RecipeError):
            raise recipe
        if (workload.device, workload.devices) == (self.own.device, self.own.devices):
            return recipe
        return recipe.model_copy(update={"cluster": self._cluster(workload)})

    def trainings(self) -> Iterator[Recipe]:
        """The file's own recipe, and those of other trainings that it can have."""
        for training in dict.fromkeys((self.own.training, *TRAININGS)):
            with contextlib.suppress(RecipeError):
                yield self.recipe_of(replace(self.own, training=training))

    def blueprint_of(self, workload: Workload) -> Blueprint:
        """The model of a workload; the same object for all devices. Raises RecipeError."""
        asked = workload.recipe_key
        if asked not in self._blueprints:
            self._blueprints[asked] = blueprint_of(self.recipe_of(workload))
        return self._blueprints[asked]

    def _changes(self, workload: Workload) -> Iterator[str]:
        own = self.own
        sizes = workload.batch * workload.sequence
        if workload.sequence != own.sequence:
            yield f"data.sequence_length={workload.sequence}"
        if workload.batch != own.batch:
            yield f"batch_size={workload.batch}"
        if self.recipe.steps and sizes != own.batch * own.sequence:
            yield f"steps={-(-self.recipe.steps * own.batch * own.sequence // sizes)}"
        if workload.training != own.training:
            yield from TRAININGS[workload.training]

    def _cluster(self, workload: Workload) -> Any:
        """The recipe's section ``cluster`` for other devices."""
        mine, count = self.cluster, workload.devices
        node = mine.devices_per_node if mine.nodes > 1 else max(count, 1)
        profile = device_profile(workload.device)
        if profile is not None and (mine.nodes == 1 or workload.device != self.own.device):
            node = profile.node_devices
        nodes, per_node = (1, count) if count <= node else (count // node, node)
        if nodes * per_node != count:
            raise RecipeError(f"{count} devices are no whole nodes of {node}", where="cluster")
        changed = {"preset": None, "device": workload.device, "nodes": nodes, "devices_per_node": per_node}
        if workload.device != self.own.device:  # their memory and price are their own
            changed |= {"memory_gib": None, "host_memory_gib": None, "price_per_device_hour": None}
        return self.recipe.cluster.model_copy(update=changed)


def workload_of(recipe: Recipe, cluster: Cluster) -> Workload:
    """The workload of a recipe."""
    device = cluster.device.kind if cluster.device.traits.is_host else cluster.device.name
    adapter = recipe.adapter
    training = "full"
    if adapter is not None:
        plain = adapter.quantize == "none"
        training = "DoRA" if adapter.name == "dora" else "LoRA" if plain else "QLoRA"
    sizes = recipe.data.sequence_length, recipe.batch_size
    return Workload(device, cluster.world_size, *sizes, training)


# -- the controls and their values --------------------------------------------------------------------


def controls_of(
    workloads: Workloads, strategy: Strategy, measured: tuple[Workload, Strategy] | None
) -> tuple[Control, ...]:
    """All controls with more than one value, and those of the workload.

    Args:
        strategy: the chosen one of the recipe's plan.
        measured: of a run whose values are shown, too.
    """
    own = workloads.own
    others = [strategy]
    runs = [own]
    if measured is not None:
        runs.append(measured[0])
        others.append(measured[1])
    kind = workloads.cluster.device.kind
    devices = [own.device, *(name for name, profile in PROFILES.items() if profile.kind == kind)]
    numbers = {int(own.devices * times) for times in TIMES} | {1 if own.devices <= 16 else own.devices}
    batches = {max(1, int(own.batch * times)) for times in TIMES[1:-1]}
    lengths = {max(16, int(own.sequence * times)) for times in TIMES}
    made = [
        Control("device", "device", tuple(dict.fromkeys([*devices, *(run.device for run in runs)]))),
        Control("devices", "devices", _sorted(numbers - {0}, (run.devices for run in runs))),
        Control("sequence", "sequence length", _sorted(lengths, (run.sequence for run in runs))),
        Control("batch", "batch size", _sorted(batches, (run.batch for run in runs))),
        Control("training", "training", tuple(dict.fromkeys([own.training, *TRAININGS]))),
    ]
    sizes = {max(1, int(strategy[MICRO_BATCH_SIZE] * times)) for times in TIMES} | {1}
    sizes = {size for size in sizes if size <= own.batch}
    values = {MICRO_BATCH_SIZE.key: _sorted(sizes, (other[MICRO_BATCH_SIZE] for other in others))}
    values |= dict(_settings(workloads, others, sorted(numbers - {0})))
    for setting in (MICRO_BATCH_SIZE, *(setting for technique in ORDER for setting in technique.settings)):
        if len(listed := values.get(setting.key, ())) > 1:
            made.append(Control(STRATEGY + setting.key, setting.key.replace("_", " "), listed))
    return tuple(made)


def _sorted(values: Iterable[int], others: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*values, *others}))


def _settings(
    workloads: Workloads, strategies: Sequence[Strategy], worlds: Sequence[int]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Values of every setting: those of the strategies, and all that a plan may choose or compare.

    Some settings have candidates only where another is not at its default, such as the schedule of a pipeline. Values
    that rules forbid for every training and number of devices are left out, such as those of experts of a dense model.
    """
    recipe = workloads.recipe
    cluster = workloads.cluster
    first = strategies[0]
    recipes = list(workloads.trainings())
    all_settings = [setting for technique in ORDER for setting in technique.settings]
    cases = [first]
    for setting in all_settings:
        next_to = values_next_to(setting, first, recipe, cluster)
        cases += [first.with_values(**{setting.key: value}) for value in next_to if value != first[setting]]
    values = {setting: _listed(setting, cases, strategies, recipe, cluster) for setting in all_settings}
    changed = [first.with_values(**{key.key: value}) for key in all_settings for value in values[key]]
    for setting in all_settings:
        own = {strategy[setting] for strategy in strategies}
        possible = [
            value
            for value in values[setting]
            if value in own or _is_possible(setting.key, value, changed, recipes, worlds)
        ]
        if all(type(value) is int for value in possible):
            possible.sort()
        yield setting.key, tuple(possible)


def _listed(
    setting: Setting[Any],
    cases: Sequence[Strategy],
    strategies: Sequence[Strategy],
    recipe: Recipe,
    cluster: Cluster,
) -> list[Any]:
    """Values of a setting: those of the strategies first. Of values that are alike only the chosen one."""
    chosen = strategies[0][setting]
    listed = [strategy[setting] for strategy in strategies]
    listed += [value for case in cases for value in values_next_to(setting, case, recipe, cluster)]
    same = [value for value in setting.alike if value != chosen] if chosen in setting.alike else []
    return [value for value in dict.fromkeys([*listed, *extra(setting)]) if value not in same]


def _is_possible(
    key: str, value: object, strategies: Sequence[Strategy], recipes: Sequence[Recipe], worlds: Sequence[int]
) -> bool:
    """Whether one of the strategies with this value breaks no rule, for a recipe and a number of devices."""
    changed = [strategy.with_values(**{key: value}) for strategy in strategies]
    return any(
        next(broken_rules(strategy, world, recipe), None) is None
        for strategy in changed
        for recipe in recipes
        for world in worlds
    )


def values_next_to(
    setting: Setting[Any], strategy: Strategy, recipe: Recipe, cluster: Cluster
) -> Sequence[object]:
    """What the planner may choose for a setting next to the others of a strategy; none where it only has a default."""
    alone = strategy.with_values(**{setting.key: setting.default})
    case = case_of(alone, cluster.world_size, recipe, cluster.devices_per_node)
    return candidates_of(setting, case)


def extra(setting: Setting[Any]) -> list[Any]:
    """Values that a plan compares, takes as a last resort, or that cost seconds once; and then the default."""
    values = [*setting.compared, *setting.last_resort, *setting.once]
    return [*values, setting.default] if values else values
