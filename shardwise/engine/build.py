"""From a recipe and a strategy to a live model and optimizer, on any device, fake or real.

Three moves, in this order: *assemble* on the meta device (make the mesh, build the model, apply the
techniques in their one order), *materialise* (allocate this rank's shards), *fill* (initial values or
weights from disk). The dry run does the first two and skips the third; nothing here knows whether the
process group and the tensors are fake.

``DeviceMesh`` computes with real tensors and trips inside a fake mode, therefore ``assemble`` is separate
from ``materialise``: the dry run enters its fake mode between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from shardwise.core.errors import RecipeError
from shardwise.core.recipe import Recipe
from shardwise.core.scaling import scaled
from shardwise.core.strategy import Layout, Strategy
from shardwise.engine.control import LossScale, NormLimit
from shardwise.engine.optim import build_optimizer
from shardwise.engine.optim.optimizer import Optimizer
from shardwise.engine.passes import Passes, Sequential
from shardwise.engine.pipeline.executor import Pipelined
from shardwise.engine.pipeline.pipedream import PipeDream
from shardwise.engine.update import AfterBackward, Update, WithinBackward
from shardwise.model.blueprint import Batch, Blueprint
from shardwise.model.host import apart, host_memory
from shardwise.model.slices import named_parameters
from shardwise.technique import ORDER, layout_of, micro_batches
from shardwise.technique.base import (
    DATA_AXES,
    TOKEN_AXES,
    BatchTransform,
    Dtypes,
    MicroBatchHook,
    Pipeline,
    Site,
)


@dataclass
class Run:
    """A live model, its optimizer, and how they are divided. What survives a restart is in TrainState."""

    recipe: Recipe
    blueprint: Blueprint
    strategy: Strategy
    layout: Layout
    mesh: DeviceMesh
    device: torch.device
    model: nn.Module
    optimizer: Optimizer
    update: Update
    loss_scale: LossScale
    norm_limit: NormLimit
    dtypes: Dtypes
    batch_transforms: list[BatchTransform]
    micro_batch_hooks: list[MicroBatchHook]
    token_group: dist.ProcessGroup
    passes: Passes
    pipeline: Pipeline | None
    draws_apart: bool
    stream_shares: int
    void: Tensor
    """1 in host memory to leave out every update that the device has not made yet; see engine/update.py."""

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank reads."""
        rank, layout = dist.get_rank(), self.layout
        copy, piece = (layout.coordinate(rank, axis) for axis in DATA_AXES)
        return copy * layout.degree("shard") + piece

    @property
    def data_degree(self) -> int:
        """Into how many shares the batch is divided."""
        return self.layout.degree("replicate") * self.layout.degree("shard")

    def part_of(self, batch: Batch) -> Batch:
        """What this rank's model runs on, of a micro-batch of its share: all of it, or a part."""
        for transform in self.batch_transforms:
            batch = transform(batch)
        return batch

    @property
    def stage_ranks(self) -> int:
        """How many ranks share out or copy the parameters that this one has a part of."""
        return self.layout.world_size // self.layout.degree("pipeline")

    @property
    def verdict_group(self) -> dist.ProcessGroup | None:
        """The ranks that judge a step's gradients together: all (None), or a stage that is at a step of its own."""
        return None if self.pipeline is None else self.pipeline.stage_group

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's stage counts as its own: a tied one is the first stage's."""
        if self.pipeline is None or self.pipeline.rank == 0 or not self.pipeline.tied:
            return list(self.model.parameters())
        return [p for name, p in named_parameters(self.model) if name not in self.pipeline.tied]

    @property
    def random_rank(self) -> int:
        """Equal on ranks that must draw the same random numbers: those that compute parts of the same activations."""
        return dist.get_rank() // (1 if self.draws_apart else self.layout.degree("tensor"))


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """One named mesh over the world. Axes of degree 1 are left out, but for the two every run has."""
    kept = [(name, degree) for name, degree in layout.axes if degree > 1 or name in DATA_AXES]
    return init_device_mesh(
        device_type, tuple(degree for _, degree in kept), mesh_dim_names=tuple(name for name, _ in kept)
    )


def assemble(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    world_size: int,
    device_type: str,
    depth: int | None = None,
) -> Site:
    """Build the model on the meta device and apply every technique.

    ``depth`` overrides the number of blocks, of every stage where there is a pipeline.
    """
    layout = layout_of(strategy, world_size)
    mesh = make_mesh(layout, device_type)
    with torch.device("meta"):
        model = blueprint.build(depth)
    model.train()
    fp32 = Dtypes(torch.float32, torch.float32, torch.float32)
    token_axes = tuple(axis for axis in TOKEN_AXES if axis in (mesh.mesh_dim_names or ()))
    token_group = mesh[token_axes]._flatten("tokens").get_group()
    parts = blueprint.units(model), blueprint.head(model), blueprint.output(model)
    site = Site(model, *parts, strategy, layout, mesh, token_group, fp32, recipe, blueprint, depth)
    site.trained_in, site.indivisible = blueprint.trained_in, blueprint.indivisible(model)
    site.tensor_plan = lambda: blueprint.tensor_plan(model)
    if recipe.data.packing and (why := blueprint.unpackable(model)):
        what = "this model cannot keep packed documents apart"
        raise RecipeError(what, where="data.packing", why=why, fix="set it to false")
    for technique in ORDER:
        technique.apply(site)
    return site


def materialise(site: Site, recipe: Recipe, blueprint: Blueprint, device: torch.device) -> Run:
    """Allocate this rank's part of the model and of the optimizer's state. Weights are undefined until filled."""
    hosted = site.weights_on_host and apart(device)
    allocate(site, device, hosted)
    if (site.weights_on_host or site.state_offload) and not apart(device):
        site.notes.append("the device's memory is the host's: what is offloaded there stays where it is")
    spec = scaled(recipe)
    run = Run(
        recipe=recipe,
        blueprint=blueprint,
        strategy=site.strategy,
        layout=site.layout,
        mesh=site.mesh,
        device=device,
        model=site.model,
        optimizer=build_optimizer(
            site.model, spec, recipe.seed, site.state_offload, hosted, blueprint.rate_ratio
        ),
        update=WithinBackward() if site.update_in_backward else AfterBackward(),
        loss_scale=LossScale(recipe.loss_scale if site.dtypes.loss_scaled else None, device),
        norm_limit=NormLimit(spec.clip_norm, spec.adaptive_clip, device),
        dtypes=site.dtypes,
        batch_transforms=site.batch_transforms,
        micro_batch_hooks=site.micro_batch_hooks,
        token_group=site.token_group,
        passes=_passes(site, recipe),
        pipeline=site.pipeline,
        draws_apart=site.draws_apart,
        stream_shares=site.stream_shares,
        void=torch.zeros((), pin_memory=device.type == "cuda"),
    )
    run.update.attach(run)
    return run


def _passes(site: Site, recipe: Recipe) -> Passes:
    if site.pipeline is None:
        return Sequential()
    if not site.pipeline.endless:
        return Pipelined(site.pipeline)
    count = micro_batches(site.strategy, site.layout, recipe.batch_size)
    trained = [parameter for parameter in site.model.parameters() if parameter.requires_grad]
    return PipeDream(site.pipeline, trained, count)


def allocate(site: Site, device: torch.device, hosted: bool) -> None:
    """Memory for this rank's shards, in host memory where they are ``hosted``, and for buffers, on the device."""
    if not hosted:
        site.model.to_empty(device=device)
        return
    with host_memory(pinned=True):
        site.model.to_empty(device="cpu")
        # Pads and pins shards, which FSDP2 would otherwise do within the first step.
        cast("FSDPModule", site.model)._get_fsdp_state()._lazy_init()
    for module in site.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)


def build(recipe: Recipe, blueprint: Blueprint, strategy: Strategy, device: torch.device) -> Run:
    """A run that is ready for its first step. Needs an initialised default process group."""
    site = assemble(recipe, blueprint, strategy, dist.get_world_size(), device.type)
    run = materialise(site, recipe, blueprint, device)
    with torch.no_grad():
        blueprint.fill(run.model, recipe.seed)
    return run
