"""From a recipe and a strategy to a live model and optimizer, on any device, fake or real.

Three moves, in this order: *assemble* on the meta device (make the mesh, build the model, apply the
techniques in their one order), *materialise* (allocate this rank's shards), *fill* (initial values or
weights from disk). The dry run does the first two and skips the third; nothing here knows whether the
process group and the tensors are fake.

``DeviceMesh`` computes with real tensors and trips inside a fake mode, therefore ``assemble`` is separate
from ``materialise``: the dry run enters its fake mode between the two.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Layout, Strategy
from shardwise.engine.first_values import FirstValues
from shardwise.engine.forward_backward import Sequential
from shardwise.engine.loss_scale import loss_scale_of, norm_limit_of
from shardwise.engine.optim import build_optimizer
from shardwise.engine.optimizer_step import AfterBackward, WithinBackward
from shardwise.engine.pipeline import passes_of
from shardwise.engine.run import LiveModel, Run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.blueprint import Blueprint
from shardwise.recipe.lr_scaling import built
from shardwise.recipe.sections import Recipe
from shardwise.runtime.attention.steering import prefer_backends
from shardwise.runtime.offload.host import has_separate_host_memory, host_memory
from shardwise.runtime.parallel.expert_load import experts_by_name
from shardwise.runtime.parallel.shard_slices import canonical_name, share, shared_names
from shardwise.runtime.torch_private import flattened
from shardwise.runtime.torch_private_fsdp import fsdp_initialise
from shardwise.technique import ORDER, layout_of, micro_batches
from shardwise.technique.site import Context, Dtypes, EngineOptions, ModelView, Site, StageView


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """One named mesh over the world. Axes of degree 1 are left out, but for those of the data, which every run has."""
    axes = {a.name: degree for a, degree in layout.axes if degree > 1 or (a.samples and not a.layers)}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def assemble(
    recipe: Recipe,
    blueprint: Blueprint,
    strategy: Strategy,
    world_size: int,
    device_type: str,
    depth: int | None = None,
) -> Site:
    """Build the model on the meta device and apply every technique.

    ``depth`` overrides the number of blocks of the model, or of each of its stages.
    """
    layout = layout_of(strategy, world_size)
    mesh = make_mesh(layout, device_type)
    # Ranks of these axes see different tokens: losses and counts are summed over all of them by one all-reduce.
    token_axes = tuple(a.name for a, _ in layout.axes if a.tokens and a.name in (mesh.mesh_dim_names or ()))
    token_group = flattened(mesh[token_axes], "tokens").get_group()
    count = micro_batches(strategy, layout, recipe.batch_size)
    context = Context(recipe, blueprint, strategy, layout, mesh, token_group, count, depth)
    site = _site(context)
    frozen = site.objective.frozen_models()
    if frozen and site.options.place is not None:
        raise RecipeError(
            "an objective with further models does not run in pipeline stages",
            where="objective",
            why=f"the model {next(iter(frozen))!r} is not cut into stages",
            fix="set strategy.pipeline_parallel: 1",
        )
    for role, other in frozen.items():
        site.frozen[role] = _site(replace(context, blueprint=other, depth=None), trained=False)
    return site


def _site(context: Context, trained: bool = True) -> Site:
    """Build one model on the meta device and apply the techniques."""
    blueprint = context.blueprint
    with torch.device("meta"):
        model = blueprint.build(context.depth)
    if trained:
        model.train()
    else:
        model.eval().requires_grad_(False)
    if context.recipe.data.packing and (why := blueprint.packing_obstacle(model)):
        what = "this model cannot keep packed documents apart"
        raise RecipeError(what, where="data.packing", why=why, fix="set it to false")
    view = ModelView(
        model,
        [StageView(model, blueprint.blocks(model))],
        blueprint.head(model),
        blueprint.output(model),
        blueprint.context_parallel_obstacle(model),
        lambda: blueprint.tensor_plan(model),
        experts=experts_by_name(model),
    )
    # What the technique ``precision`` changes; without it all is fp32.
    options = EngineOptions(Dtypes(torch.float32, torch.float32, torch.float32))
    site = Site(context, view, options, trained=trained)
    for technique in ORDER:
        if trained or technique.on_frozen:
            technique.apply(site)
    if trained:
        site.hints.note(*site.objective.plan_notes)
    # Last: techniques decide the dtype.
    blueprint.compute_in(site.view.model, site.options.dtypes.compute)
    return site


def materialise(site: Site, device: torch.device) -> Run:
    """Allocate this rank's part of the model and of the optimizer's state. Weights are undefined until filled."""
    options = site.options
    recipe = site.context.recipe
    model = site.view.model
    # Where device memory is host memory, as on the CPU, nothing has to move.
    on_host = options.weights_on_host and has_separate_host_memory(device)
    allocate(model, device, on_host)
    frozen = {role: other.view.model for role, other in site.frozen.items()}
    for other in frozen.values():
        allocate(other, device, on_host=False)
    if (options.weights_on_host or options.state_offload) and not has_separate_host_memory(device):
        site.hints.note("device memory is host memory: CPU offload moves nothing")
    spec = built(recipe)
    # Its state is allocated here, before the first step, so that the dry run counts it and a checkpoint can be loaded.
    optimizer = build_optimizer(
        model,
        spec,
        recipe.seed,
        options.state_offload,
        hosted=on_host,
        rate_ratio=site.context.blueprint.rate_ratio,
        ranks=site.context.layout.world_size,
        staged=options.place is not None,
    )
    live = LiveModel(
        site.context,
        options,
        device,
        model,
        optimizer,
        loss_scale_of(recipe.loss_scale if options.dtypes.loss_scaled else None, device),
        norm_limit_of(spec.clip_norm, spec.adaptive_clip, device),
        frozen,
        site.objective,
        FirstValues(model) if options.keeps_first_values else None,
    )
    update = WithinBackward(live) if options.update_in_backward else AfterBackward(live)
    passes = Sequential(live, update) if options.place is None else passes_of(live, update)
    return Run(**vars(live), passes=passes, update=update)


def allocate(model: nn.Module, device: torch.device, on_host: bool) -> None:
    """Memory for this rank's shards, ``on_host`` in host memory, and for buffers, on the device."""
    if not on_host:
        # to_empty() gives every name of a tied parameter memory of its own, which the optimizer would update, too.
        tied = {canonical_name(alias): canonical_name(first) for alias, first in shared_names(model).items()}
        _to_empty(model, device)
        share(model, tied)
        return
    with host_memory(pinned=True):
        _to_empty(model, torch.device("cpu"))
        # Pads and pins shards, which FSDP2 would otherwise do within the first step.
        fsdp_initialise(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _to_empty(model: nn.Module, device: torch.device) -> None:
    """Allocate each module once, also one that several parents have; FSDP2's modules after those inside of them."""
    # ``modules`` lists a parent before its children.
    for module in reversed(list(model.modules())):
        module.to_empty(device=device, recurse=False)


def build(recipe: Recipe, blueprint: Blueprint, strategy: Strategy, device: torch.device) -> Run:
    """A run that is ready for its first step. Needs an initialised default process group."""
    profile = cluster_of(recipe.cluster).device
    if profile.traits.torch_type == device.type:  # the recipe of a warm-up names no device
        prefer_backends(device, profile.attention)
    run = materialise(assemble(recipe, blueprint, strategy, dist.get_world_size(), device.type), device)
    with torch.no_grad():
        blueprint.fill(run.model, recipe.seed)
        for role, other in run.objective.frozen_models().items():
            other.fill(run.frozen[role], recipe.seed)
    # Both after the fill: these are the first values, and optimizers of libraries may copy the initial weights.
    if run.first_values is not None:
        run.first_values.keep()
    run.optimizer.start()
    return run
