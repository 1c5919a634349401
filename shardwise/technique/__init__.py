"""The one list that orders techniques, and what follows from it: settings, rules, layout, the one-line form.

``ORDER`` is the order in which techniques are applied to a model on the meta device. To add a technique,
write its file and add it here (docs/how-to/add-a-technique.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Axis, Layout, Setting, Strategy, complete
from shardwise.hardware.device import DeviceProfile
from shardwise.recipe.sections import Recipe
from shardwise.technique.activation_offload import ActivationOffload
from shardwise.technique.adapter import Adapter
from shardwise.technique.base import MICRO_BATCH_SIZE as MICRO_BATCH_SIZE
from shardwise.technique.base import OF_BLOCKS as OF_BLOCKS
from shardwise.technique.base import PARTS as PARTS
from shardwise.technique.base import STATES as STATES
from shardwise.technique.base import Dividing
from shardwise.technique.base import Technique as Technique
from shardwise.technique.checkpointing import Checkpointing
from shardwise.technique.chunked_loss import ChunkedLoss
from shardwise.technique.compiling import Compile
from shardwise.technique.digits import Digits as Digits
from shardwise.technique.digits import digits_of as digits_of
from shardwise.technique.expert import ExpertParallel
from shardwise.technique.fit_advice import REMEDIES as REMEDIES
from shardwise.technique.fit_advice import UNSHARDED as UNSHARDED
from shardwise.technique.float8 import Float8
from shardwise.technique.in_backward import InBackward
from shardwise.technique.pipeline.technique import PIPELINE_PARALLEL, PipelineParallel, stages_per_rank
from shardwise.technique.place import Stretch
from shardwise.technique.precision import PRECISION, Precision
from shardwise.technique.reference import Reference
from shardwise.technique.rules import Case, Rule, Violation, violations
from shardwise.technique.sequence import SequenceParallel
from shardwise.technique.state_offload import StateOffloading
from shardwise.technique.tensor import TensorParallel
from shardwise.technique.zero import ZeRO

ORDER: tuple[Technique, ...] = (
    Adapter(),
    PipelineParallel(),
    Reference(),
    ExpertParallel(),
    TensorParallel(),
    SequenceParallel(),
    Compile(),
    Checkpointing(),
    ActivationOffload(),
    ChunkedLoss(),
    Precision(),
    Float8(),
    StateOffloading(),
    ZeRO(),
    InBackward(),
)

AXES: tuple[Axis, ...] = tuple(
    sorted(
        (axis for technique in ORDER if isinstance(technique, Dividing) for axis in technique.axes),
        key=lambda axis: axis.position,
    )
)
"""The axes of the mesh, outermost first."""

SETTINGS: tuple[Setting[Any], ...] = (
    *(setting for technique in ORDER for setting in technique.settings),
    MICRO_BATCH_SIZE,
)

RULES: tuple[Rule, ...] = tuple(rule for technique in ORDER for rule in technique.rules)


_ROUNDING = tuple(setting for technique in ORDER if technique.rounds for setting in technique.settings)

DIGITS = frozenset(setting.key for setting in _ROUNDING)
"""Keys that decide in which digits a step computes. They change the training, so they are the recipe's to choose."""


def strategy_from(pinned: Mapping[str, object]) -> Strategy:
    """The strategy with the pinned settings and the defaults of all others."""
    return complete(pinned, SETTINGS)


def within(strategy: Strategy, part: str | None) -> Strategy:
    """The strategy with the settings of all other parts of the step at their defaults; None for those of every part."""
    values = {key: value for technique in ORDER for key, value in technique.within(strategy, part).items()}
    return strategy.with_values(**values)


def case_of(strategy: Strategy, world_size: int, recipe: Recipe, devices_per_node: int = 0) -> Case:
    """What rules and candidates are asked about."""
    taken = _degrees_alone(strategy, world_size)
    degrees = {axis: taken[axis] for axis in AXES if not axis.samples}
    return Case(strategy, world_size, recipe, degrees, devices_per_node)


def broken_rules(strategy: Strategy, world_size: int, recipe: Recipe) -> Iterator[Violation]:
    """What forbids this strategy on this many devices for this recipe."""
    return violations(RULES, case_of(strategy, world_size, recipe))


def refuse_broken(recipe: Recipe, world_size: int, where: Callable[[str], str]) -> None:
    """Raise RecipeError when what a recipe pins cannot be done on this many devices.

    ``where`` says in which file and line a key of the strategy section stands. Torch is not loaded for this.
    """
    strategy = strategy_from(recipe.strategy)
    for violation in broken_rules(strategy, world_size, recipe):
        key = violation.rule.key
        nearest = ", ".join(f"{key}: {value}" for key, value in violation.nearest.items())
        raise RecipeError(
            f"{key} cannot be {strategy.values[key]} {violation.rule.condition or f'on {world_size} devices'}",
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


def setting_of(key: str) -> Setting[Any]:
    """The setting with this key of the strategy section."""
    return next(setting for setting in SETTINGS if setting.key == key)


def candidates_of(setting: Setting[Any], case: Case) -> tuple[object, ...]:
    """The values that the planner may choose for a technique's setting."""
    return next(
        tuple(technique.candidates(setting, case)) for technique in ORDER if setting in technique.settings
    )


def native(strategy: Strategy, device: DeviceProfile, pinned: Mapping[str, object]) -> bool:
    """Whether this device has units for every dtype that the strategy asks for, except by its ``pinned`` values."""
    return all(
        setting.key in pinned and strategy_from(pinned)[setting] == value
        for setting, value, _ in _beyond(strategy, device)
    )


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
    """The precision by name, to compare runs or their checkpoints."""
    return strategy[PRECISION]


def in_fp64(strategy: Strategy) -> Strategy:
    """The same division of the step, computed in fp64."""
    values = {setting.key: setting.default for setting in _ROUNDING}
    return strategy.with_values(**{**values, PRECISION.key: "fp64"})


def stages_of(strategy: Strategy) -> int:
    """The number of stages into which the blocks of a model are cut."""
    return strategy[PIPELINE_PARALLEL] * stages_per_rank(strategy)


def without_stages(strategy: Strategy) -> Strategy:
    """The strategy with all blocks on every rank, on as many devices."""
    divide = (technique for technique in ORDER if isinstance(technique, Dividing))
    ranks = strategy[PIPELINE_PARALLEL]
    changed = (technique.without_stages(strategy, ranks).items() for technique in divide)
    return strategy.with_values(**dict(itertools.chain.from_iterable(changed)))


def stretch(strategy: Strategy, micro_batches: int) -> Stretch:
    """What stages make of a step, before any is looked at."""
    divide = (
        technique
        for technique in ORDER
        if isinstance(technique, Dividing) and any(axis.stages for axis in technique.axes)
    )
    return next(divide).stretch(strategy, micro_batches)


def mesh_layout(degrees: Mapping[str, int]) -> Layout:
    """The mesh with these degrees, by the name of their axis; 1 for axes that are left out."""
    return Layout(tuple((axis, degrees.get(axis.name, 1)) for axis in AXES))


def layout_of(strategy: Strategy, world_size: int) -> Layout:
    """The mesh of a valid strategy. Each technique takes its degrees from the remaining world size."""
    degrees: dict[str, int] = {}
    alone = _degrees_alone(strategy, world_size)
    within_layer = math.prod(degree for axis, degree in alone.items() if axis.within_layer)
    left = world_size
    for technique in ORDER:
        taken = {
            axis.name: max(1, degree // within_layer) if axis.layers else degree
            for axis, degree in _axes_of(technique, technique.degrees(strategy, left))
        }
        degrees.update(taken)
        left //= math.prod(taken.values())
    return mesh_layout(degrees)


def _degrees_alone(strategy: Strategy, world_size: int) -> dict[Axis, int]:
    """The degree of every axis as its technique takes it from the whole world."""
    taken = (_axes_of(technique, technique.degrees(strategy, world_size)) for technique in ORDER)
    return dict(itertools.chain.from_iterable(taken))


def _axes_of(technique: Technique, degrees: Mapping[str, int]) -> Iterator[tuple[Axis, int]]:
    axes = technique.axes if isinstance(technique, Dividing) else ()
    return ((axis, degrees[axis.name]) for axis in axes)


def has_stages(layout: Layout) -> bool:
    """Whether ranks hold different blocks of the model."""
    return layout.ranks(lambda axis: axis.stages) > 1


def micro_batches(strategy: Strategy, layout: Layout, batch_size: int) -> int:
    """Micro-batches per rank and optimizer step: the batch divided over data-parallel ranks, rounded up."""
    return -(-batch_size // (strategy[MICRO_BATCH_SIZE] * layout.data_degree))


def strategy_line(strategy: Strategy, layout: Layout, batch_size: int) -> str:
    """The strategy as people write it: ``bf16 · zero3×8 · mb4×ga2``."""
    labels = [technique.label(strategy, layout) for technique in ORDER]
    labels.append(f"mb{strategy[MICRO_BATCH_SIZE]}×ga{micro_batches(strategy, layout, batch_size)}")
    return " · ".join(label for label in labels if label)
