"""What a technique is, and the site on which techniques build.

A technique is one file: the settings it reads, the rules of what it cannot be combined with, the mesh axes
it adds, and ``apply``, which changes a model that still lies on the meta device. The planner and the trainer
know only this interface. They run the same ``apply``, so a technique is planned the day it runs.

Technique files are read before torch is loaded (a recipe is validated in under half a second), therefore
they import torch inside ``apply``. That is the one place where this code base imports inside a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.core.strategy import Layout, Rule, Setting, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES: tuple[str, ...] = ("pipeline", "replicate", "shard", "sequence", "tensor")
"""Mesh axes, slowest-varying first: the chattiest axis lies inside the node."""

DATA_AXES: tuple[str, ...] = ("replicate", "shard")
"""The axes whose ranks read different samples. ``shard`` takes what the other degrees leave of the world."""


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


MicroBatchHook = Callable[[bool], None]
"""Called before each micro-batch's forward pass with whether it is the last of its optimizer step."""


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
        data_group: the ranks that read different samples.
        dtypes: set by precision, used by whoever stores or sends weights.
        micro_batch_hooks: what to call before every micro-batch.
        trained_in: dtype in which the weights to be loaded were trained, where that is known.
        notes: what a plan should say about what was done here, in sentences.
        period: after how many units what was done to them repeats itself; 0 where it depends on their number.
        shallowest: the fewest units with which a model shows what deeper ones repeat.
        update_in_backward: whether parameters are updated as soon as their gradients are complete.
        state_offload: where optimizer state lies, when not all of it is on the device.
        weights_on_host: whether stored weights and reduced gradients lie in host memory, where that is another.
    """

    model: nn.Module
    units: list[nn.Module]
    head: list[nn.Module]
    output: nn.Linear | None
    strategy: Strategy
    layout: Layout
    mesh: DeviceMesh
    data_group: ProcessGroup
    dtypes: Dtypes
    micro_batch_hooks: list[MicroBatchHook] = field(default_factory=list)
    trained_in: torch.dtype | None = None
    notes: list[str] = field(default_factory=list)
    period: int = 1
    shallowest: int = 1
    update_in_backward: bool = False
    state_offload: StateOffload | None = None
    weights_on_host: bool = False


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

    def degrees(self, strategy: Strategy, world_size: int) -> dict[str, int]:
        """Degrees of the mesh axes that this technique adds."""
        ...

    def label(self, strategy: Strategy, layout: Layout) -> str:
        """How it appears in the one-line form of the strategy; "" when it is off."""
        ...

    def apply(self, site: Site) -> None:
        """Change the model. Called outside any fake mode, with parameters on the meta device."""
        ...
