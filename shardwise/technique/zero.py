"""ZeRO 0-3 and hybrid sharding on FSDP2 (Rajbhandari et al. 2020; Zhao et al. 2023).

One mechanism, ``fully_shard``, and two axes: ``shard``, over which state is divided, and ``replicate``, over which it
is copied. The stages differ only in which weights stay gathered and when gradients are reduced:

    stage  sharded                      gathered parameters        gradients reduced      traffic (M micro-batches)
    0      nothing (shard degree 1)     a copy per layer in use    at the last            2
    1      optimizer, master weights    forward to last backward   at the last            2
    2      + gradients                  forward to last backward   at every micro-batch   1 + M
    3      + parameters                 one layer at a time        at every micro-batch   3 M

in units of (N-1)/N * parameters per rank and optimizer step. Hybrid sharding sets ``replicate`` > 1: the stage's
traffic then stays inside each group of ``shard`` ranks, and one all-reduce of the shards per step crosses the groups.
A single data-parallel rank sends nothing. With mixed precision its stage 1 casts each weight once a step. Stage 0 casts
it in every forward and backward pass, and needs 2 bytes per parameter less. Frozen weights that a rank has whole, in
the dtype in which it computes, are used as they are stored.
Other axes whose ranks see different tokens, such as that of the sequence, are joined with the axis of the shards (in
stage 0, of the copies). Modules that such an axis divides (``ModelView.own_axes``) are FSDP groups of their own, whose
mesh leaves it out.

FSDP groups: every block is one, and the head (last norm and output layer) is another, so that its gradient is reduced
first. The rest is a third: the embedding, and the head too if the two share weights. In stage 3 all of them are
resharded after the forward pass, so the paper's 3M holds to the byte. The backward pass needs the head, the last block
and the root first; they are gathered again while the loss is computed. FSDP2's default keeps the root gathered instead:
one all-gather less, and as much memory at the peak. Gradients are summed, not averaged. The step divides the loss by
the global token count before the backward pass, so FSDP2's own division is switched off.

Each micro-batch's backward pass ends before the next begins (FSDP2's ``set_is_last_backward`` is unchanged). Otherwise
the input of the last reduce-scatter, the gradient of the root group in fp32, lives through the next forward pass: 2 GiB
for Llama-3-8B. The price is that this one reduction does not overlap. Where passes of other micro-batches come between
the two passes of one, nothing is gathered while the loss is computed, and "last" is the rank's last backward pass.

Stage 0 in one dtype has nothing to gather or to cast: FSDP2 is not applied. Gradients are summed over the ranks as
DistributedDataParallel does it (runtime/parallel/replicas.py), whose C++ reducer does not run on fake tensors. With
several dtypes, tensor parallelism, stages or offload, stage 0 is FSDP2 with one shard: weights are copied for use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Axis, Layout, Setting, Strategy
from shardwise.hardware.kinds import HOST
from shardwise.technique.base import STATES, Dividing
from shardwise.technique.in_backward import OPTIMIZER_IN_BACKWARD
from shardwise.technique.offload import weights_on_host
from shardwise.technique.precision import casts_weights
from shardwise.technique.rules import Case, Rule
from shardwise.technique.site import ModelView, Site

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

REPLICATE_AXIS = Axis("replicate", position=10, piece="copy", samples=True, tokens=True, copies=True)
SHARD_AXIS = Axis("shard", position=20, piece="shard", samples=True, tokens=True)
"""Mesh axes, which take the devices that all other techniques leave."""

ZERO_STAGE: Setting[int] = Setting(
    "zero_stage",
    default=0,
    doc="ZeRO stage: 0 = DDP (replicated); 1 shards optimizer state; 2 also gradients; 3 = FSDP, also parameters",
    kind=int,
    choices=(0, 1, 2, 3),
    candidates=(0, 1, 2, 3),
    last_resort=(2, 3),
    ordered=False,  # stages above 0 divide the optimizer's work
)

REPLICATE: Setting[int] = Setting(
    "replicate",
    default=1,
    doc="HSDP (hybrid sharding): number of replicas, each sharded over the other data-parallel ranks",
    kind=int,
    minimum=1,
)


def _divisor_at_most(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _indivisible(case: Case) -> bool:
    return case.data_ranks % case.strategy[REPLICATE] != 0


def _nearest_replicate(case: Case) -> Mapping[str, object]:
    return {"replicate": _divisor_at_most(case.data_ranks, case.strategy[REPLICATE])}


def _sharing_ranks(case: Case) -> int:
    """Ranks that have the same part of the model, and may share its states."""
    return case.data_ranks * case.ranks(lambda axis: axis.tokens)


RULES: tuple[Rule, ...] = (
    Rule(
        key="replicate",
        reason="the number of copies must divide the data-parallel ranks",
        broken=_indivisible,
        nearest=_nearest_replicate,
    ),
)


class ZeRO(Dividing):
    """Shards optimizer state (1), gradients (2) and parameters (3) over the ``shard`` axis."""

    name = "zero"
    on_frozen = True
    axes = (REPLICATE_AXIS, SHARD_AXIS)
    part = STATES
    settings = (ZERO_STAGE, REPLICATE)
    rules = RULES

    def candidates(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """Shards over all ranks, or over those of a node with copies over the nodes.

        One rank has nothing to shard. Where weights are cast (mixed precision), its stage 1 is the faster of the two
        stages that differ, and the first candidate.
        """
        sharing = _sharing_ranks(case)
        if setting is ZERO_STAGE:
            alone = (1, 0) if casts_weights(case.strategy) else (0,)
            return setting.candidates if sharing > 1 else alone
        if setting is REPLICATE and case.strategy[ZERO_STAGE] > 0 and case.devices_per_node > 0:
            # Ranks that compute the same tokens are neighbours: a node has fewer of those that share states.
            same_tokens = case.ranks(lambda axis: axis.within_layer and not axis.tokens)
            copies = sharing * same_tokens // case.devices_per_node
            return (1, copies) if 1 < copies < case.data_ranks and case.data_ranks % copies == 0 else (1,)
        return ()

    def last_resort(self, setting: Setting[Any], case: Case) -> Sequence[object]:
        """Stages 2 and 3 only with offloaded parameters. One rank may also take any of its candidates.

        With offloaded parameters, stage 2 frees gradients on the device after each layer, and stage 3 also frees the
        gathered weights. Otherwise, on one rank, stage 2 is no better than 1, and stage 3 no better than 0.
        """
        if setting is not ZERO_STAGE:
            return setting.last_resort
        later = setting.last_resort if weights_on_host(case.strategy) else ()
        return later if _sharing_ranks(case) > 1 else (*self.candidates(setting, case), *later)

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        """Both axes of the data, which take all devices that are left. Stage 0 is a shard degree of 1.

        Axes that take more devices than there are, which rules refuse, leave degrees of 1.
        """
        copies = max(1, left) if strategy[ZERO_STAGE] == 0 else strategy[REPLICATE]
        return {REPLICATE_AXIS.name: copies, SHARD_AXIS.name: max(1, left // copies)}

    def without_stages(self, strategy: Strategy, ranks: int) -> dict[str, object]:
        """Copies of groups of as many shards; a single group shards over all ranks."""
        copies = strategy[REPLICATE]
        return {REPLICATE.key: copies * ranks if copies > 1 else copies}

    def without_copies(self) -> dict[str, object]:
        return {REPLICATE.key: REPLICATE.default}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        ranks, copies = layout.ranks(lambda axis: axis.tokens), layout.degree(REPLICATE_AXIS)
        if strategy[ZERO_STAGE] == 0:
            return f"zero0×{ranks}"
        outer = f"×{copies} copies" if copies > 1 else ""
        return f"zero{strategy[ZERO_STAGE]}×{ranks // copies}{outer}"

    def apply(self, site: Site) -> None:
        stage, view, place = site.strategy[ZERO_STAGE], site.view, site.options.place
        if not site.trained and stage != 3:
            return  # stages 1 and 2 divide what a frozen model does not have
        if stage == 0 and _is_whole(site):
            _sum_gradients(site, _mesh(site))
            return
        # Stage 0 has nothing to gather over the wire: its layer copies are freed after use, as stage 3's. A backward
        # pass in two halves needs them from the first half to the second.
        reshard = stage == 3 or (stage == 0 and not (place is not None and place.splits_backward))
        _shard(site, reshard)
        if place is not None:
            _gather_in_order(view)
        elif stage == 3:
            _gather_ahead(view, site.context.blueprint.casts_inputs)
        members = _members(view)

        def before_micro_batch(last: bool, index: int) -> None:
            for module in members[index]:
                if stage in (0, 1):
                    # Nothing is reduced before the last micro-batch.
                    module.set_requires_gradient_sync(last, recurse=False)
                else:
                    # Shards are reduced in every micro-batch, copies in the last one.
                    module.set_requires_all_reduce(last, recurse=False)
                # The next micro-batch computes with the same gathered weights.
                if not reshard:
                    module.set_reshard_after_backward(last, recurse=False)

        site.options.micro_batch_hooks.append(before_micro_batch)


def _is_whole(site: Site) -> bool:
    """Whether each rank has all weights, in the dtype and memory in which it computes, and nothing else cuts them."""
    from torch.distributed.tensor import DTensor

    dtypes, layout, options = site.options.dtypes, site.context.layout, site.options
    updated_later = layout.world_size == 1 or not site.strategy[OPTIMIZER_IN_BACKWARD]
    uncut = options.place is None and not any(isinstance(p, DTensor) for p in site.view.model.parameters())
    one_dtype = len({dtypes.storage, dtypes.compute, dtypes.reduce}) == 1
    return uncut and one_dtype and updated_later and not options.weights_on_host


def _sum_gradients(site: Site, mesh: DeviceMesh) -> None:
    """Sum gradients over the copies: of the head, of each block from the last one on, and of the rest."""
    from shardwise.runtime.parallel.replicas import Replicas

    if mesh.size() == 1:
        return
    _refuse_scaled_rows(site.view.model)
    view = site.view
    replicas = Replicas([*view.head[::-1], *view.blocks[::-1], view.model], mesh.get_group(0))
    site.options.micro_batch_hooks.append(lambda last, _: replicas.before_backward(last))
    site.options.backward_hooks.append(replicas.finish)


def _shard(site: Site, reshard: bool) -> None:
    """Make FSDP groups of modules with axes of their own, of the blocks, of the head, and of the rest."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from shardwise.runtime.parallel.shard_slices import shard_dims
    from shardwise.runtime.torch_private_fsdp import fsdp_integers, fsdp_skip_ungathered

    dtypes, view, on_host = site.options.dtypes, site.view, site.options.weights_on_host
    _refuse_shared_weights(view.model, view.blocks)
    _refuse_scaled_rows(view.model)
    precision = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.compute != dtypes.storage else None,
        reduce_dtype=dtypes.reduce,
        cast_forward_inputs=not site.context.blueprint.casts_inputs,
    )
    # The block has cast its inputs already; routing weights, inputs of experts, stay in fp32.
    within = replace(precision, cast_forward_inputs=False)
    pinned = site.context.mesh.device_type != HOST.torch_type
    offload = CPUOffloadPolicy(pin_memory=pinned) if on_host else OffloadPolicy()
    mesh = _mesh(site)
    meshes = {axes: _mesh(site, axes) for axes in dict.fromkeys(view.own_axes.values())}
    groups: list[tuple[nn.Module | list[nn.Module], DeviceMesh, MixedPrecisionPolicy]] = [
        *((module, meshes[axes], within) for module, axes in view.own_axes.items()),
        *((block, mesh, precision) for block in view.blocks),
        *([(view.head, mesh, precision)] if view.head else []),
        (view.model, mesh, precision),
    ]
    as_stored = {p for p in _used_as_stored(site, mesh, meshes) if not on_host or p.numel() == 0}
    fsdp_skip_ungathered()
    with fsdp_integers():
        for group, over, policy in groups:
            fully_shard(
                group,
                mesh=over,
                mp_policy=policy,
                offload_policy=offload,
                reshard_after_forward=reshard,
                shard_placement_fn=shard_dims(group, over.size(-1)),
                ignored_params=as_stored,
            )
            # A rank that is alone has nothing to sum, and FSDP2 would divide a copy of its gradients by 1.
            if over.size() > 1:
                _sum_instead_of_average(group if isinstance(group, list) else [group])


def _sum_instead_of_average(modules: Sequence[nn.Module]) -> None:
    for module in cast("Sequence[FSDPModule]", modules):
        # The loss is divided by the targets of the whole batch, so gradients are summed over ranks.
        module.set_gradient_divide_factor(1.0)
        # FSDP2 would scale by PREMUL_SUM, which gloo does not have.
        module.set_force_sum_reduction_for_comms(True)


def _used_as_stored(
    site: Site, mesh: DeviceMesh, meshes: Mapping[tuple[Axis, ...], DeviceMesh]
) -> Iterator[nn.Parameter]:
    """Empty parameters, which FSDP2 cannot reduce, and those that it would only copy: frozen, whole, in one dtype."""
    own = {p: meshes[axes] for module, axes in site.view.own_axes.items() for p in module.parameters()}
    for parameter in site.view.model.parameters():
        cast = parameter.is_floating_point() and parameter.dtype != site.options.dtypes.compute
        whole = own.get(parameter, mesh).size(-1) == 1  # the last axis is that of the shards (_mesh)
        if parameter.numel() == 0 or (not parameter.requires_grad and not cast and whole):
            yield parameter


def _refuse_shared_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """FSDP2 gathers a weight with one group. Raises RecipeError for a weight that a block and another module use."""
    from shardwise.runtime.parallel.shard_slices import canonical_name

    number = {block: index for index, block in enumerate(blocks)}
    named = model.named_modules(remove_duplicate=False)
    paths = {f"{path}.": number[module] for path, module in named if module in number}
    first: dict[nn.Parameter, int | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        index = next((index for path, index in paths.items() if name.startswith(path)), None)
        if first.setdefault(parameter, index) != index:
            users = [f"block {i}" for i in (first[parameter], index) if i is not None]
            other = users[1] if users[1:] else "the rest of the model"
            raise RecipeError(
                "blocks that share weights are not sharded",
                where="strategy.zero_stage",
                why=f"{users[0]} shares {canonical_name(name)} with {other}",
                fix="set zero_stage: 0, with a precision that stores and computes in one dtype",
            )


def _refuse_scaled_rows(model: nn.Module) -> None:
    """Raise RecipeError for an embedding with ``max_norm``: a call scales the rows that this rank's samples read."""
    for path, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None:
            raise RecipeError(
                "an embedding with max_norm trains on one rank only",
                where=f"model: {path}",
                why="each call writes into its weight, which ranks have in parts or as copies",
                fix="scale the looked-up rows in forward(), or train on one device with zero_stage: 0 in one dtype",
            )


def _members(view: ModelView) -> list[list[FSDPModule]]:
    """The modules that gather and reduce parameters of each stage.

    Parameters before the first block or after the last one belong to the root, which only one of the stages uses.
    """
    from torch.distributed.fsdp import FSDPModule

    def within(model: nn.Module) -> list[FSDPModule]:
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    root = cast("FSDPModule", view.model)
    return [
        within(stage.model) + [root] * (stage.model is not view.model and (stage.first or stage.last))
        for stage in view.stages
    ]


def _gather_in_order(view: ModelView) -> None:
    """In every backward pass, prefetch a stage's blocks one ahead.

    FSDP2 does so by the order of the last forward pass, which is another micro-batch's where passes interleave. A
    module that names itself prefetches nothing.
    """
    for alone in (view.model, *view.own_axes):
        cast("FSDPModule", alone).set_modules_to_backward_prefetch([cast("FSDPModule", alone)])
    for stage in view.stages:
        mine = cast("list[FSDPModule]", stage.blocks + (view.head[:1] if stage.last else []))
        for before, block in zip([mine[0], *mine], mine, strict=False):
            block.set_modules_to_backward_prefetch([before])


def _mesh(site: Site, without: Sequence[Axis] = ()) -> DeviceMesh:
    """The axes that FSDP2 copies over and shards over, in this order.

    Ranks of other axes that see different tokens have the same weights and sum gradients, as data-parallel ranks do:
    stage 0 copies over them, the others shard over them. ``without`` leaves axes out that divide the weights
    themselves. One-dimensional where there is nothing to copy: FSDP2 would otherwise hold all-reduce buffers for a
    group of one.
    """
    from shardwise.runtime.torch_private import flattened, two_axes

    mesh, layout = site.context.mesh, site.context.layout
    alike = [
        axis.name
        for axis, degree in layout.axes
        if axis.tokens and degree > 1 and axis not in (REPLICATE_AXIS, SHARD_AXIS, *without)
    ]
    outer, inner, joined = REPLICATE_AXIS.name, SHARD_AXIS.name, ""
    if alike:
        own = REPLICATE_AXIS if site.strategy[ZERO_STAGE] == 0 else SHARD_AXIS
        joined = "+".join((own.name, *alike))
        whole = flattened(mesh[own.name, *alike], joined)
        outer, inner = (joined, inner) if own is REPLICATE_AXIS else (outer, joined)
    copied = layout.degree(outer) > 1
    chosen = two_axes(mesh, outer, inner) if copied else whole if inner == joined else mesh[inner]
    if joined:
        site.options.groups.append((joined, chosen.get_group(joined)))
    return chosen


def _gather_ahead(view: ModelView, for_loss: bool) -> None:
    """After the forward pass, gather what the backward pass needs first: the root, the head and the last block.

    Args:
        for_loss: in evaluations, too: the loss of a user may read these weights.
    """
    import torch

    first_in_backward = [view.model, *view.head[:1], *view.blocks[-1:]]

    def gather(*_: object) -> None:
        if for_loss or torch.is_grad_enabled():
            for module in first_in_backward:
                cast("FSDPModule", module).unshard()

    view.model.register_forward_hook(gather)
