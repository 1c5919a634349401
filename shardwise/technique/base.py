"""What a technique is.

A technique is one file: the settings it reads, the rules on what it cannot be combined with, and ``apply``, which
changes a model on the meta device. The planner and the trainer know only this interface. They run the same ``apply``,
so a technique is planned the day it runs.

A *wrapping* technique changes blocks. A *dividing* technique owns mesh axes.

Technique files are read before torch is loaded, because a recipe is validated in under half a second. Therefore they
import torch inside ``apply``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from shardwise.core.strategy import Axis, Layout, Setting, Strategy
from shardwise.hardware.cluster import MOST_DEVICES
from shardwise.technique.place import Stretch
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import Site

MICRO_BATCH_SIZE: Setting[int] = Setting(
    "micro_batch_size",
    default=1,
    doc="micro-batch size: sequences per forward pass and rank; gradient accumulation makes up the rest of the batch",
    kind=int,
    minimum=1,
    maximum=1_000_000_000,
)


MOST_PASSES = 2**16
"""Micro-batches of a rank in one step, where a schedule lists them or the planner chooses their size."""
MOST_RANKS = MOST_DEVICES
"""The largest degree of a mesh axis."""


STATES, KEPT, LOSS_PART = "states", "activations", "loss"
PARTS: tuple[str, ...] = (STATES, KEPT, LOSS_PART)
"""Parts of a step: where weights, gradients and optimizer state are; what a block keeps for the backward pass; the
loss. What techniques of two parts change adds up, so the planner counts each part alone (planner/compose.py)."""
OF_BLOCKS: tuple[str, ...] = (STATES, KEPT)
"""Parts that each block has. A model of few blocks shows all that the others change."""


class Technique(ABC):
    """One way to save memory or to use more devices. Has no state of its own.

    Attributes:
        name: one word, for the list of techniques.
        settings: the keys of the ``strategy:`` section that it declares.
        rules: what cannot be combined with it, as data, with the reason in words.
        rounds: whether its settings decide in which digits a step computes, and not how it is divided.
        on_frozen: whether it applies to models that are not trained, too: it divides weights or work, or casts.
        part: the part of the step that it changes, one of PARTS; "" where it changes what other parts hold, too.
    """

    name: ClassVar[str]
    rounds: ClassVar[bool] = False
    on_frozen: ClassVar[bool] = False
    part: ClassVar[str] = ""
    settings: ClassVar[tuple[Setting[Any], ...]] = ()
    rules: ClassVar[tuple[Rule, ...]] = ()

    def label(self, strategy: Strategy, layout: Layout) -> str:
        """Its part of the one-line form of the strategy; "" when it is off."""
        return ""

    def within(self, strategy: Strategy, part: str | None) -> Mapping[str, object]:
        """Its settings, at their defaults unless it changes ``part``, or all parts."""
        kept = self.part in ("", part)
        return {s.key: strategy[s] if kept else s.default for s in self.settings}

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """What the planner may choose for a setting, where those before it are chosen; nothing for the default."""
        return setting.candidates

    def last_resort(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """What it may also choose where nothing else fits, or where it may save much."""
        return setting.last_resort

    def has_effect(self, setting: Setting[Any], case: Case) -> bool:
        """Whether another value of a setting could change this run; a plan does not speak of others."""
        return True

    def degrees(self, strategy: Strategy, left: int) -> Mapping[str, int]:
        """Degrees of the mesh axes that it takes, out of the ``left`` devices that techniques before it leave."""
        return {}

    @abstractmethod
    def apply(self, site: Site) -> None:
        """Change the model. Called outside any fake mode, with parameters on the meta device."""


class Wrapping(Technique):
    """A technique that changes blocks, and takes no mesh axis."""


class Dividing(Technique):
    """A technique that divides work over the ranks of mesh axes.

    Where ranks hold different blocks, their place (``technique/place.py``) says which of them a plan must look at, and
    how predictions combine.
    """

    axes: ClassVar[tuple[Axis, ...]]

    @abstractmethod
    def degrees(self, strategy: Strategy, left: int) -> Mapping[str, int]: ...

    def without_stages(self, strategy: Strategy, ranks: int) -> Mapping[str, object]:
        """Settings that differ where all blocks are on each of the ``ranks`` that have stages now."""
        stages = any(axis.stages for axis in self.axes)
        return {s.key: s.default for s in self.settings} if stages else {}

    def without_copies(self) -> Mapping[str, object]:
        """Settings with which a single group of ranks shards the states."""
        return {}

    def stretch(self, strategy: Strategy, micro_batches: int) -> Stretch:
        """What its stages make of a step."""
        return Stretch()


def divisors(number: int, most: int | None = None) -> Sequence[int]:
    """What divides a number of ranks, up to ``most``: candidates of a degree."""
    limit = number if most is None else min(number, most)
    return [degree for degree in range(1, limit + 1) if number % degree == 0]


def divides_world(setting: Setting[int]) -> Rule:
    """The rule of every degree: all that share one copy of the model must together divide the devices."""

    def broken(case: Case) -> bool:
        return case.strategy[setting] > 1 and case.world_size % case.model_ranks != 0

    def nearest(case: Case) -> dict[str, object]:
        value = case.strategy[setting]
        others = case.model_ranks // value
        smaller = range(1, min(value, case.world_size + 1))
        fitting = [d for d in smaller if case.world_size % (d * others) == 0]
        return {setting.key: fitting[-1]} if fitting else {}

    return Rule(
        key=setting.key,
        reason="the ranks that share one copy of the model must divide the number of devices",
        broken=broken,
        nearest=nearest,
        fix="lower one of the degrees",
    )
