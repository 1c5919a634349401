"""What a technique is, and the site on which techniques build.

A technique is one file: the settings it reads, the rules of what it cannot be combined with, the mesh axes
it adds, and ``apply``, which changes a model that still lies on the meta device. The planner and the trainer
know only this interface. They run the same ``apply``, so a technique is planned the day it runs.

Technique files are read before torch is loaded (a recipe is validated in under half a second), therefore
they import torch inside ``apply``. That is the one place where this code base imports inside a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.core.pipeline_schedule import Order, in_flight, orders
from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.core.recipe import Recipe
    from shardwise.model.blueprint import Blueprint
    from shardwise.model.parts import Part
    from shardwise.model.split import Split

AXES: tuple[str, ...] = ("pipeline", "replicate", "shard", "sequence", "tensor")
"""Mesh axes, slowest-varying first: the chattiest axis lies inside the node."""

DATA_AXES: tuple[str, ...] = ("replicate", "shard")
"""The axes whose ranks read different samples. They take what the other degrees leave of the world."""

TOKEN_AXES: tuple[str, ...] = ("replicate", "shard", "sequence")
"""The axes whose ranks see different tokens: counts of targets and sums of losses are summed over them."""

BLOCKING_AXES: tuple[str, ...] = ("tensor",)
"""The axes whose collectives stand between one operation and the next, so that no computation hides them."""


@dataclass
class Dtypes:
    """Dtypes of one run: of stored weights, of compute, of the reduction of gradients.

    ``loss_scaled`` says that compute has too narrow a range for gradients, so the loss must be scaled.
    """

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    loss_scaled: bool = False


@dataclass(frozen=True)
class StateOffload:
    """Optimizer state that is not on the device: which share of its elements, and whether in files of a folder."""

    fraction: float = 1.0
    folder: str | None = None


Channel = tuple[bool, bool]
"""Whether messages go forward, and whether from the last rank round to the first or back."""


@dataclass(frozen=True)
class Pipeline:
    """This rank's place in a pipeline.

    Attributes:
        schedule: as core/pipeline_schedule.py calls it.
        ranks: how many there are, of which this is number ``rank``.
        stages_per_rank: how many stages each has.
        held: this rank's, by number: stage s lies on rank s % ranks.
        blocks: how many the model has in every stage.
        channels: the groups of this rank's pipeline for messages forward and backward, and round the end.
        tied: names of parameters that the first and the last stage share.
        tied_group: the ranks that hold the same piece of those; None on a rank that holds none.
        stage_group: the ranks of this stage, where stages are at different steps; None where all are at one.
        vertical_sync: whether a micro-batch uses the same version of the weights on all stages.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    rank: int
    held: Mapping[int, Part]
    blocks: tuple[int, ...]
    channels: Mapping[Channel, ProcessGroup]
    tied: tuple[str, ...] = ()
    tied_group: ProcessGroup | None = None
    stage_group: ProcessGroup | None = None
    vertical_sync: bool = False

    @property
    def group(self) -> ProcessGroup:
        """All ranks of this pipeline."""
        return self.channels[True, False]

    def order(self, count: int) -> Order:
        """What this rank does with so many micro-batches."""
        return orders(self.schedule, self.ranks, self.stages_per_rank, count)[self.rank]

    def in_flight(self, count: int) -> int | None:
        """How many of them it holds activations of at once; None where it holds parts of them."""
        return in_flight(self.order(count)) if self.stages_per_rank == 1 else None

    def shorter(self, after: int) -> Pipeline:
        """The same place in a pipeline with at most so many ranks after this one."""
        return replace(self, ranks=min(self.ranks, self.rank + 1 + after))

    @property
    def depth(self) -> int | None:
        """Blocks of each of this rank's stages in the whole model; None where they differ."""
        counts = {self.blocks[stage] for stage in self.held}
        return counts.pop() if len(counts) == 1 else None

    @property
    def distinct(self) -> tuple[int, ...]:
        """The first rank of every kind: ranks of one kind differ in the number of micro-batches in flight, at most.

        A later one of a kind has no more of them than the first.
        """
        kinds: dict[object, int] = {}
        for rank in range(self.ranks):
            kinds.setdefault(self.kind(rank), rank)
        return tuple(kinds.values())

    def kind(self, rank: int) -> object:
        """What a rank has in common with those that hold as many blocks and nothing else, or the same else."""
        return self.blocks[rank :: self.ranks], rank == 0, rank == self.ranks - 1

    @property
    def endless(self) -> bool:
        """Whether stages are at different steps at the same time."""
        return self.stage_group is not None

    @property
    def halved(self) -> bool:
        """Whether a backward pass comes in two halves."""
        return self.schedule == "zero_bubble"


BatchTransform = Callable[[dict[str, "torch.Tensor"]], dict[str, "torch.Tensor"]]
"""Takes a micro-batch of a rank of the data axes, returns what the model runs on."""

MicroBatchHook = Callable[[bool, int], None]
"""Called before each micro-batch's passes, of a pipeline before each backward pass, with whether it is the last of its
optimizer step on this rank."""


@dataclass
class Site:
    """Where techniques build: the model on the meta device, its mesh, and what later techniques need to know.

    Attributes:
        model: the model; ``apply`` changes it in place.
        units: the repeated blocks, the only places where a technique may wrap or cut. A technique that
            replaces a block replaces it here too.
        head: what runs after the last unit and is gathered and reduced on its own; may be empty.
        output: the linear layer that yields the logits, where that is known.
        mesh: one named mesh over the whole world, with the axes of ``layout``.
        token_group: the ranks that see different tokens.
        dtypes: set by precision, used by whoever stores or sends weights.
        recipe, blueprint: what is built, for whoever builds a part of the model anew.
        depth: number of blocks of the model, or of each of this rank's parts, instead of their own.
        batch_transforms: what becomes of a micro-batch before anything is computed from it.
        indivisible: why a sample of the model cannot be divided along its sequence; "" where it can.
        joined_axes: meshes of several axes in one, by their names joined with "+", as ``Layout`` reads them.
        micro_batch_hooks: what to call before every micro-batch with whether it is the last of the step for this part
            of the model, and with the number of that part (as in ``parts``).
        tensor_plan: how the model's layers may be split over ranks; raises RecipeError where it does not say.
        parts: the models that run by themselves: those of a pipeline's stages, or none where the model itself does.
        stream_shares: among how many ranks the sequence is shared out between blocks.
        draws_apart: whether ranks that compute parts of the same activations draw random numbers of their own.
        trained_in: dtype in which the weights to be loaded were trained, where that is known.
        notes: what a plan should say about what was done here, in sentences.
        period: after how many units what was done to them repeats itself; 0 where it depends on their number.
        shallowest: the fewest units with which a model shows what deeper ones repeat.
        update_in_backward: whether parameters are updated as soon as their gradients are complete.
        state_offload: where optimizer state lies, when not all of it is on the device.
        pipeline: this rank's part in a pipeline, where there is one.
        weights_on_host: whether stored weights and reduced gradients lie in host memory, where that is another.
    """

    model: nn.Module
    units: list[nn.Module]
    head: list[nn.Module]
    output: nn.Linear | None
    strategy: Strategy
    layout: Layout
    mesh: DeviceMesh
    token_group: ProcessGroup
    dtypes: Dtypes
    recipe: Recipe
    blueprint: Blueprint
    depth: int | None = None
    micro_batch_hooks: list[MicroBatchHook] = field(default_factory=list)
    tensor_plan: Callable[[], Mapping[str, Split]] = dict
    parts: list[nn.Module] = field(default_factory=list)
    stream_shares: int = 1
    draws_apart: bool = False
    batch_transforms: list[BatchTransform] = field(default_factory=list)
    indivisible: str = ""
    joined_axes: dict[str, DeviceMesh] = field(default_factory=dict)
    trained_in: torch.dtype | None = None
    notes: list[str] = field(default_factory=list)
    period: int = 1
    shallowest: int = 1
    update_in_backward: bool = False
    state_offload: StateOffload | None = None
    weights_on_host: bool = False
    pipeline: Pipeline | None = None

    @property
    def stretches(self) -> list[list[nn.Module]]:
        """The units that run one right after the other: all, or of a pipeline those of each of this rank's stages."""
        if self.pipeline is None:
            return [self.units]
        rest, found = list(self.units), []
        for part in self.pipeline.held.values():
            found.append(rest[: len(part.blocks)])
            rest = rest[len(part.blocks) :]
        return found

    @property
    def has_end(self) -> bool:
        """Whether what comes after the last unit of the model belongs to this rank."""
        return self.pipeline is None or any(part.last for part in self.pipeline.held.values())


def divides_world(setting: Setting[int]) -> Rule:
    """The rule of every degree: all that share one copy of the model must together divide the devices."""

    def broken(case: Case) -> bool:
        return case.strategy[setting] > 1 and case.world_size % case.model_ranks != 0

    def nearest(case: Case) -> dict[str, object]:
        value = case.strategy[setting]
        others = case.model_ranks // value
        fitting = [d for d in range(1, value) if case.world_size % (d * others) == 0]
        return {setting.key: fitting[-1]} if fitting else {}

    return Rule(
        key=setting.key,
        reason="the ranks that share one copy of the model must divide the number of devices",
        broken=broken,
        nearest=nearest,
        fix="lower one of the degrees",
    )


class Technique(Protocol):
    """One way to save memory or to use more devices."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Sequence[Setting[Any]]:
        """The keys of the ``strategy:`` section that this technique reads."""
        ...

    @property
    def rules(self) -> Sequence[Rule]:
        """What cannot be combined, as data, with the reason in words."""
        ...

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        """Degrees of the mesh axes that this technique adds, of the devices that those before it have left."""
        ...

    def label(self, strategy: Strategy, layout: Layout) -> str:
        """How it appears in the one-line form of the strategy; "" when it is off."""
        ...

    def apply(self, site: Site) -> None:
        """Change the model. Called outside any fake mode, with parameters on the meta device."""
        ...
