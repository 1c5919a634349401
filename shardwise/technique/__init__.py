"""The one list that orders techniques, and what follows from it: settings, rules, layout, the one-line form.

``ORDER`` is the order in which techniques are applied to a model on the meta device. To add a technique,
write its file and add it here (docs/how-to/add-a-technique.md).

``RESERVED`` are keys of the recipe's contract whose techniques are not written yet: only the neutral value
is accepted, so that a full recipe of today stays valid and a request for tomorrow's technique is refused in
words instead of being ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardwise.core.device import DeviceProfile
from shardwise.core.errors import RecipeError
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy, Violation, complete, violations
from shardwise.technique.activation_offload import ActivationOffload
from shardwise.technique.adapter import Adapter
from shardwise.technique.base import AXES, DATA_AXES, Technique
from shardwise.technique.checkpointing import Checkpointing
from shardwise.technique.float8 import Float8
from shardwise.technique.in_backward import InBackward
from shardwise.technique.ladder import LADDER as LADDER
from shardwise.technique.ladder import WHOLE as WHOLE
from shardwise.technique.loss import ChunkedLoss
from shardwise.technique.pipeline import PIPELINE_PARALLEL, PipelineParallel, stages_per_rank
from shardwise.technique.precision import PRECISION, Precision
from shardwise.technique.sequence import SequenceParallel
from shardwise.technique.state_offload import StateOffloading
from shardwise.technique.tensor import Tensor
from shardwise.technique.zero import Zero

ORDER: tuple[Technique, ...] = (
    Adapter(),
    PipelineParallel(),
    Tensor(),
    SequenceParallel(),
    Checkpointing(),
    ActivationOffload(),
    ChunkedLoss(),
    Precision(),
    Float8(),
    StateOffloading(),
    Zero(),
    InBackward(),
)

MICRO_BATCH_SIZE: Setting[int] = Setting(
    "micro_batch_size",
    default=1,
    doc="sequences per forward pass and rank; the rest of the batch is accumulated",
    kind=int,
    minimum=1,
)

_LATER = "not in this version yet"
RESERVED: tuple[Setting[Any], ...] = (
    Setting("compile", False, "torch.compile per block", kind=bool, choices=(False,), note=_LATER),
)

SETTINGS: tuple[Setting[Any], ...] = (
    *(setting for technique in ORDER for setting in technique.settings),
    MICRO_BATCH_SIZE,
    *RESERVED,
)

RULES: tuple[Rule, ...] = tuple(rule for technique in ORDER for rule in technique.rules)


def strategy_from(pinned: Mapping[str, object]) -> Strategy:
    """The strategy that keeps what is pinned and takes every other setting's default."""
    return complete(pinned, SETTINGS)


def broken_rules(strategy: Strategy, world_size: int, recipe: Recipe) -> Iterator[Violation]:
    """What forbids this strategy on this many devices for this recipe."""
    model_ranks = 1
    for technique in ORDER:
        for axis, degree in technique.degrees(strategy, world_size).items():
            model_ranks *= 1 if axis in DATA_AXES else degree
    return violations(RULES, Case(strategy, world_size, recipe, model_ranks))


def refuse_broken(recipe: Recipe, world_size: int, where: Callable[[str], str]) -> None:
    """Raise RecipeError when what a recipe pins cannot be done on this many devices.

    ``where`` says in which file and line a key of the strategy section stands. Torch is not loaded for this.
    """
    strategy = strategy_from(recipe.strategy)
    for violation in broken_rules(strategy, world_size, recipe):
        key = violation.rule.key
        nearest = ", ".join(f"{key}: {value}" for key, value in violation.nearest.items())
        raise RecipeError(
            f"{key} cannot be {strategy.values[key]} on {world_size} devices",
            where=where(key),
            why=violation.rule.reason,
            fix=f"the nearest that works is {nearest}" if nearest else violation.rule.fix,
        )


def refuse_unsupported(
    pinned: Mapping[str, object], device: DeviceProfile, where: Callable[[str], str]
) -> None:
    """Raise RecipeError when a setting asks for a dtype that this device has no units for. No torch."""
    for setting, value, dtype in _beyond(strategy_from(pinned), device):
        if not device.emulates:
            raise RecipeError(
                f"{setting.key} cannot be {value} on {device.name}",
                where=where(setting.key),
                why=f"it has no units for {dtype}",
                fix=f"the nearest that works is {setting.key}: {device.nearest(dtype)}",
            )


def native(strategy: Strategy, device: DeviceProfile) -> bool:
    """Whether this device has units for every dtype that the strategy asks for."""
    return not any(_beyond(strategy, device))


def emulated(strategy: Strategy, device: DeviceProfile) -> Iterator[str]:
    """What this device does without units for it, in sentences."""
    for setting, value, _ in _beyond(strategy, device):
        yield (
            f"{setting.key} {value} is emulated on {device.name}: its numerics, and the memory of the"
            " emulation; neither the time nor the memory of a device that has it"
        )


def _beyond(strategy: Strategy, device: DeviceProfile) -> Iterator[tuple[Setting[Any], object, str]]:
    for setting in SETTINGS:
        dtype = setting.units.get(strategy[setting])
        if dtype is not None and not device.supports(dtype):
            yield setting, strategy[setting], dtype


def precision_of(strategy: Strategy) -> str:
    """The precision by name, for whoever compares runs or their checkpoints."""
    return strategy[PRECISION]


def stages_of(strategy: Strategy) -> int:
    """Into how many stages the blocks of a model are cut, for whoever needs a model of as many."""
    return strategy[PIPELINE_PARALLEL] * stages_per_rank(strategy)


def layout_of(strategy: Strategy, world_size: int) -> Layout:
    """The mesh that a valid strategy needs. Each technique takes of what those before it have left of the world."""
    degrees, left = dict.fromkeys(AXES, 1), world_size
    for technique in ORDER:
        taken = technique.degrees(strategy, left)
        degrees.update(taken)
        left //= math.prod(taken.values())
    return Layout(tuple((axis, degrees[axis]) for axis in AXES))


def micro_batches(strategy: Strategy, layout: Layout, batch_size: int) -> int:
    """Micro-batches per rank and optimizer step: the batch divided over data-parallel ranks, rounded up."""
    per_pass = strategy[MICRO_BATCH_SIZE] * layout.degree("replicate") * layout.degree("shard")
    return -(-batch_size // per_pass)


def one_line(strategy: Strategy, layout: Layout, batch_size: int) -> str:
    """The strategy as people write it: ``bf16 · zero3×8 · mb4×ga2``."""
    labels = [technique.label(strategy, layout) for technique in ORDER]
    labels.append(f"mb{strategy[MICRO_BATCH_SIZE]}×ga{micro_batches(strategy, layout, batch_size)}")
    return " · ".join(label for label in labels if label)
