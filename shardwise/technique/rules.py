"""Rules: combinations of settings that cannot run, as data with the reason in words. No torch.

Each technique declares its rules in its own file. They are checked when a recipe is read, and by the planner
for every candidate strategy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Axis, Strategy
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.experts import experts_in_folder
from shardwise.recipe.presets import dimensions_of
from shardwise.recipe.sections import Recipe


@dataclass(frozen=True)
class Case:
    """The input of a rule: a strategy, the number of devices, and the recipe.

    Attributes:
        degrees: of the axes that do not divide the data.
        devices_per_node: 0 where it is not known.
    """

    strategy: Strategy
    world_size: int
    recipe: Recipe
    degrees: Mapping[Axis, int] = field(default_factory=dict)
    devices_per_node: int = 0

    @functools.cached_property
    def dimensions(self) -> Dimensions | None:
        """Of a native decoder; None for a model from elsewhere, and for dimensions that are refused elsewhere."""
        model = self.recipe.model
        if model.hf is not None or model.factory is not None:
            return None
        try:
            return dimensions_of(model)
        except RecipeError:
            return None

    @functools.cached_property
    def experts(self) -> int | None:
        """Experts in a layer; 0 for a dense model, None where it is not known before the model is loaded."""
        if self.dimensions is not None:
            return self.dimensions.experts
        folder = self.recipe.model.hf
        return None if folder is None else experts_in_folder(folder)

    def ranks(self, selects: Callable[[Axis], bool]) -> int:
        """The product of the degrees of the axes that ``selects`` names."""
        return math.prod(degree for axis, degree in self.degrees.items() if selects(axis))

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped by the norm of all parameters."""
        return self.recipe.optimizer.clip_norm is not None or self.recipe.optimizer.adaptive_clip is not None

    @property
    def model_ranks(self) -> int:
        """Devices that together compute one replica of the model."""
        return self.ranks(lambda axis: True)

    @property
    def data_ranks(self) -> int:
        """Number of replicas that read different samples; rounded down if the devices do not divide evenly."""
        return max(1, self.world_size // self.model_ranks)


@dataclass(frozen=True)
class Rule:
    """A combination that cannot run, as data: when it applies, why, and which key to change.

    Attributes:
        key: the setting that the error names.
        reason: why, in words.
        broken: whether a case breaks the rule. Rules are checked before torch is loaded.
        nearest: values of settings that satisfy the rule.
        fix: what to do if no setting helps.
        condition: under which the value cannot be, in words; "" for the number of devices.
    """

    key: str
    reason: str
    broken: Callable[[Case], bool]
    nearest: Callable[[Case], Mapping[str, object]] = field(default=lambda case: {})
    fix: str = ""
    condition: str = ""


@dataclass(frozen=True)
class Violation:
    rule: Rule
    nearest: Mapping[str, object]


def violations(rules: Sequence[Rule], case: Case) -> Iterator[Violation]:
    """The rules that a case breaks."""
    for rule in rules:
        if rule.broken(case):
            yield Violation(rule, rule.nearest(case))
