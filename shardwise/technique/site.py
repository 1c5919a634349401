"""The site on which techniques build: four values, one for each reader.

``Context`` is fixed before the first technique is applied: recipe, strategy and mesh.
``ModelView`` is the model and its parts, which techniques change in place. ``EngineOptions`` tell the engine how to run
the model. ``PlanHints`` tell the planner what it may extrapolate, and what a plan should say.

Hints combine: each technique adds its own, in any order, and cannot overwrite those of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shardwise.core.strategy import Axis, Layout, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.model.blueprint import Blueprint, TrainingObjective
    from shardwise.recipe.sections import Recipe
    from shardwise.runtime.parallel.expert_load import ExpertLoad
    from shardwise.runtime.parallel.tensor import Split
    from shardwise.technique.place import Place

BatchTransform = Callable[[dict[str, "torch.Tensor"]], dict[str, "torch.Tensor"]]
"""Takes a micro-batch of a rank's share of the batch, returns the part that the model runs on."""

MicroBatchHook = Callable[[bool, int], None]
"""Called before the passes of each micro-batch, or where passes of several interleave before each backward pass.

Arguments: whether it is the last micro-batch of the optimizer step on this rank, and the index of the stage in
``ModelView.stages``.
"""


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of one run: of stored weights, of compute, of the reduction of gradients.

    ``loss_scaled``: whether compute has too narrow a range for gradients, so that the loss must be scaled.
    """

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    loss_scaled: bool = False


@dataclass(frozen=True)
class StateOffload:
    """Optimizer state outside the device: the share of its elements, and the folder of its files if it is on a disk."""

    fraction: float = 1.0
    folder: str | None = None


@dataclass(frozen=True)
class Context:
    """The recipe, the strategy and the mesh of a build.

    Attributes:
        mesh: one named mesh over the whole world, with the axes of ``layout``.
        token_group: the ranks that see different tokens.
        micro_batches: of one rank in one optimizer step.
        depth: number of blocks of the model, or of each of this rank's stages, instead of their own.
    """

    recipe: Recipe
    blueprint: Blueprint
    strategy: Strategy
    layout: Layout
    mesh: DeviceMesh
    token_group: ProcessGroup
    micro_batches: int
    depth: int | None = None


class Capacity(Protocol):
    """Room of a fixed size for a load that only the device knows, such as the tokens of an expert.

    A step that needed more is void: no rank updates, and the step is run again with more room.

    Attributes:
        factor: the room, relative to a balanced load.
        used: the largest share of the room that was asked for since the step began; above 1 something was left out.
            A scalar on the device, fp32; None before the first.
    """

    factor: float
    used: torch.Tensor | None

    def enlarge(self, used: float, factor: float) -> str:
        """Make room for this share of the room at ``factor``, and a little more, on every rank alike; in words."""


@dataclass
class StageView:
    """Consecutive blocks that run right after each other, in a module that runs by itself.

    Attributes:
        first: whether the model's own input enters here.
        last: whether the loss is computed here.
    """

    model: nn.Module
    blocks: list[nn.Module]
    first: bool = True
    last: bool = True


@dataclass
class ModelView:
    """The model on the meta device, and its parts.

    Attributes:
        model: the root; all stages are within it.
        stages: this rank's stages. One, which is the whole model, unless a technique cuts it.
        head: the modules after the last block. They are gathered and reduced on their own; may be empty.
        output: the linear layer that yields the logits; None where it is unknown or not on this rank.
        context_parallel_obstacle: why a sample of the model cannot be divided along its sequence; "" where it can.
        tensor_plan: how the model's layers may be split over ranks. Calling it raises RecipeError for a model without
            such a plan.
        own_axes: of modules whose parameters are divided over axes along which those of other modules are equal, such
            as experts: these axes. Their parameters are DTensors over them, and their gradients are not summed over
            them.
        experts: of the whole model: the number of experts of each experts module, by its name.
    """

    model: nn.Module
    stages: list[StageView]
    head: list[nn.Module]
    output: nn.Linear | None
    context_parallel_obstacle: str = ""
    tensor_plan: Callable[[], Mapping[str, Split]] = dict
    own_axes: dict[nn.Module, tuple[Axis, ...]] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of all stages: the only places where a technique may wrap or cut."""
        return [block for stage in self.stages for block in stage.blocks]

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes the loss."""
        return any(stage.last for stage in self.stages)

    def replace(self, modules: Mapping[nn.Module, nn.Module]) -> None:
        """Put other modules in the place of blocks or of modules of the head."""
        for name, module in list(self.model.named_modules()):
            if module in modules:
                self.model.set_submodule(name, modules[module])
        for stage in self.stages:
            stage.blocks = [modules.get(block, block) for block in stage.blocks]
        self.head = [modules.get(module, module) for module in self.head]


@dataclass
class EngineOptions:
    """How the engine runs the model.

    Attributes:
        dtypes: set by precision; read by techniques and by the engine where weights are stored or sent.
        state_offload: where optimizer state is stored; None for all of it on the device.
        weights_on_host: whether stored weights and reduced gradients are in host memory.
        update_in_backward: whether each parameter is updated as soon as its gradient is complete.
        batch_transforms: applied to every micro-batch before anything is computed from it.
        micro_batch_hooks: called before every micro-batch.
        backward_hooks: called after the last backward pass of a step, before anything reads the gradients.
        sampling: entered where the model continues texts token by token: every rank runs all of a text.
        sequence_shards: ranks over which hidden states are divided along the sequence between blocks.
        random_per_rank: whether ranks of the tensor axis draw random numbers of their own.
        groups: process groups other than those of single mesh axes, each with the name of its axis (of joined ones,
            as ``Layout`` reads them). The plan counts their traffic under that name.
        place: this rank's place on an axis whose ranks hold different blocks; None without such an axis.
        capacity: room of a fixed size that a step may exceed; None where nothing depends on the data.
        expert_load: what counts the tokens of experts; None for a model without experts.
        reference: where the objective's reference is (technique/reference.py); None without one.
        keeps_first_values: whether the trained parameters' first values are kept for it.
    """

    dtypes: Dtypes
    state_offload: StateOffload | None = None
    weights_on_host: bool = False
    update_in_backward: bool = False
    batch_transforms: list[BatchTransform] = field(default_factory=list)
    micro_batch_hooks: list[MicroBatchHook] = field(default_factory=list)
    backward_hooks: list[Callable[[], None]] = field(default_factory=list)
    sampling: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)
    sequence_shards: int = 1
    random_per_rank: bool = False
    groups: list[tuple[str, ProcessGroup]] = field(default_factory=list)
    place: Place | None = None
    capacity: Capacity | None = None
    expert_load: ExpertLoad | None = None
    reference: str | None = None
    keeps_first_values: bool = False


@dataclass
class PlanHints:
    """What the planner may extrapolate, and what a plan should say. Hints of several techniques combine.

    Attributes:
        repeat_every: blocks after which the treatment of blocks repeats itself (``every:2`` gives 2). 0 if the
            treatment depends on the total depth, which disables extrapolation.
        min_depth: the fewest blocks of a model from which deeper ones can be extrapolated.
        notes: sentences for the plan.
    """

    repeat_every: int = 1
    min_depth: int = 1
    notes: list[str] = field(default_factory=list)

    def repeats(self, blocks: int) -> None:
        """The treatment of blocks repeats itself after so many; 0 if it depends on the total depth."""
        self.repeat_every = math.lcm(self.repeat_every, blocks)

    def needs_depth(self, blocks: int) -> None:
        """A model of fewer blocks does not show the behaviour of deeper ones."""
        self.min_depth = max(self.min_depth, blocks)

    def note(self, *sentences: str) -> None:
        """Add sentences to the plan."""
        self.notes += sentences


@dataclass
class Site:
    """All that ``Technique.apply`` reads and changes.

    Attributes:
        trained: whether the model of ``view`` is trained.
        frozen: of the trained model's site, those of the models that its objective reads, by role.
    """

    context: Context
    view: ModelView
    options: EngineOptions
    hints: PlanHints = field(default_factory=PlanHints)
    trained: bool = True
    frozen: dict[str, Site] = field(default_factory=dict)

    @property
    def strategy(self) -> Strategy:
        return self.context.strategy

    @property
    def objective(self) -> TrainingObjective:
        """What the run makes small, with its reference where the techniques put it."""
        return self.context.blueprint.minimises.with_reference(self.options.reference)
