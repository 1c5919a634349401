"""ZeRO 0-3 and hybrid sharding on FSDP2 (Rajbhandari et al. 2020; Zhao et al. 2023).

One mechanism, ``fully_shard``, and two axes: ``shard``, over which state is divided, and ``replicate``, over
which it is copied. The stages differ only in what is kept gathered, and when gradients are reduced:

    stage  sharded                      gathered parameters        gradients reduced      traffic (M micro-batches)
    0      nothing (shard degree 1)     a copy per layer in use    at the last            2
    1      optimizer, master weights    forward to last backward   at the last            2
    2      + gradients                  forward to last backward   at every micro-batch   1 + M
    3      + parameters                 one layer at a time        at every micro-batch   3 M

in units of (N-1)/N * parameters per rank and optimizer step. Hybrid sharding sets ``replicate`` > 1: the
stage's traffic then stays inside each group of ``shard`` ranks, and one all-reduce of the shards per step
crosses the groups. With sequence parallelism the axis of the shards (in stage 0, of the copies) is joined with that
of the sequence.

Chosen: every unit (block) is one FSDP group, the head (last norm and output layer) another, so that its gradient
is reduced first and not held to the end of the backward pass, and the rest (the embedding; the head too where
the two share weights) a third. In stage 3 all of them are resharded after the forward pass, so that the paper's
3M holds to the byte; what the backward pass needs first (head, last unit, and the root, which FSDP2 gathers at
its start) is gathered again while the loss is computed, so that it need not wait. FSDP2's default would keep
the root gathered instead, which sends less by one gathering of it and holds as much at the peak. Gradients are
summed, not averaged: the step divides the loss by the global token count before the backward pass, so FSDP2's
own division is switched off.

Every micro-batch's backward pass is finished before the next begins (FSDP2's ``set_is_last_backward`` is left
alone): otherwise the last reduce-scatter's input, the gradient of the root group in fp32, is held through the next
forward pass, 2 GiB for Llama-3-8B. The price is that this one reduction is not hidden. In a pipeline, where forward
passes of others lie between a micro-batch's two passes, nothing is gathered while the loss is computed, and "last"
above is the last backward pass of the rank.

Refused: DistributedDataParallel for stage 0 (its C++ reducer does not run on fake tensors, so it could not
be planned by the code that trains). The price is one copy of each layer's weights at a time, freed after
use, and a memory copy per layer and pass that is small against the layer's matrix products.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.technique.base import DATA_AXES, Pipeline, Site

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

ZERO_STAGE: Setting[int] = Setting(
    "zero_stage",
    default=0,
    doc="0 replicates; 1 shards optimizer state; 2 gradients too; 3 parameters too",
    kind=int,
    choices=(0, 1, 2, 3),
    candidates=(0, 1, 2, 3),
)

REPLICATE: Setting[int] = Setting(
    "replicate",
    default=1,
    doc="hybrid sharding: number of outer copies, each sharded over the rest of the data-parallel ranks",
    kind=int,
    minimum=1,
)


def _divisor_at_most(number: int, limit: int) -> int:
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _indivisible(case: Case) -> bool:
    return case.data_ranks % case.strategy[REPLICATE] != 0


def _nearest_replicate(case: Case) -> Mapping[str, object]:
    return {"replicate": _divisor_at_most(case.data_ranks, case.strategy[REPLICATE])}


RULES: tuple[Rule, ...] = (
    Rule(
        key="replicate",
        reason="the number of copies must divide the data-parallel ranks",
        broken=_indivisible,
        nearest=_nearest_replicate,
    ),
)


@dataclass(frozen=True)
class Zero:
    """Divides optimizer state (1), gradients (2) and parameters (3) over the ``shard`` axis."""

    name: str = "zero"
    settings: Sequence[Setting[Any]] = (ZERO_STAGE, REPLICATE)
    rules: Sequence[Rule] = RULES

    def degrees(self, strategy: Strategy, left: int) -> dict[str, int]:
        """Both axes of the data, which take all that is left. Stage 0 is a shard degree of 1."""
        replicate = left if strategy[ZERO_STAGE] == 0 else strategy[REPLICATE]
        return {"replicate": replicate, "shard": left // replicate}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        shard, replicate, sequence = (layout.degree(axis) for axis in (*reversed(DATA_AXES), "sequence"))
        if strategy[ZERO_STAGE] == 0:
            return f"zero0×{replicate * sequence}"
        copies = f"×{replicate} copies" if replicate > 1 else ""
        return f"zero{strategy[ZERO_STAGE]}×{shard * sequence}{copies}"

    def apply(self, site: Site) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        stage = site.strategy[ZERO_STAGE]
        mesh = _mesh(site)
        hybrid = mesh.ndim == 2
        policy = MixedPrecisionPolicy(
            param_dtype=site.dtypes.compute if site.dtypes.compute != site.dtypes.storage else None,
            reduce_dtype=site.dtypes.reduce,
        )
        pinned = site.mesh.device_type != "cpu"
        shards = CPUOffloadPolicy(pin_memory=pinned) if site.weights_on_host else OffloadPolicy()
        # Stage 0 has nothing to gather over the wire: its layer copies are freed after use, as stage 3's. A backward
        # pass in two halves needs them from the first half to the second.
        halved = site.pipeline is not None and site.pipeline.halved
        reshard = stage == 3 or (stage == 0 and not halved)
        groups: list[nn.Module | list[nn.Module]] = [
            *site.units,
            *([site.head] if site.head else []),
            site.model,
        ]
        for group in groups:
            fully_shard(
                group, mesh=mesh, mp_policy=policy, offload_policy=shards, reshard_after_forward=reshard
            )
        for module in site.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if site.pipeline is not None:
            _gather_in_order(site, site.pipeline)
        elif stage == 3:
            _gather_ahead(site)

        members = _members(site)

        def before_micro_batch(last: bool, part: int) -> None:
            for module in members[part]:
                if stage in (0, 1):
                    module.set_requires_gradient_sync(last, recurse=False)
                elif hybrid:
                    module.set_requires_all_reduce(last, recurse=False)
                if not reshard:
                    module.set_reshard_after_backward(last, recurse=False)

        site.micro_batch_hooks.append(before_micro_batch)


def _members(site: Site) -> list[list[FSDPModule]]:
    """The modules that gather and reduce parameters of each of this rank's parts.

    What lies before the first block or after the last one belongs to the root, which only one of the parts uses.
    """
    from torch.distributed.fsdp import FSDPModule

    def within(model: nn.Module) -> list[FSDPModule]:
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    if site.pipeline is None:
        return [within(site.model)]
    root = cast("FSDPModule", site.model)
    ends = [part.first or part.last for part in site.pipeline.held.values()]
    return [within(model) + [root] * end for model, end in zip(site.parts, ends, strict=True)]


def _gather_in_order(site: Site, pipeline: Pipeline) -> None:
    """In every backward pass, gather a part's units one ahead.

    FSDP2 does so by the order of the last forward pass, which in a pipeline is another micro-batch's. A module that
    names itself gathers nothing ahead.
    """
    root = cast("FSDPModule", site.model)
    root.set_modules_to_backward_prefetch([root])
    for part, units in zip(pipeline.held.values(), site.stretches, strict=True):
        mine = cast("list[FSDPModule]", units + (site.head[:1] if part.last else []))
        for before, unit in zip([mine[0], *mine], mine, strict=False):
            unit.set_modules_to_backward_prefetch([before])


def _mesh(site: Site) -> DeviceMesh:
    """The axes that FSDP2 copies over and shards over, in this order.

    Ranks of the sequence axis have the same weights and sum gradients of other tokens, as data-parallel ranks do:
    stage 0 copies over them, the others shard over them. One-dimensional where there is nothing to copy: FSDP2
    would otherwise hold all-reduce buffers for a group of one.
    """
    copies, shards = DATA_AXES
    if site.layout.degree("sequence") > 1:
        if site.strategy[ZERO_STAGE] == 0:
            copies = _joined(site, copies)
        else:
            shards = _joined(site, shards)
    if site.layout.degree(copies) == 1:
        return site.joined_axes.get(shards) or site.mesh[shards]
    with warnings.catch_warnings():
        # Of slicing by the name of joined axes; 2.11 has nothing else to put two meshes together.
        warnings.simplefilter("ignore")
        return site.mesh[copies, shards]


def _joined(site: Site, axis: str) -> str:
    """The name of an axis joined with that of the sequence."""
    name = f"{axis}+sequence"
    site.joined_axes[name] = site.mesh[axis, "sequence"]._flatten(name)
    return name


def _gather_ahead(site: Site) -> None:
    """After the forward pass, gather what the backward pass needs first: the root, the head and the last unit."""
    import torch

    first_in_backward = [site.model, *site.head[:1], *site.units[-1:]]

    def gather(*_: object) -> None:
        if torch.is_grad_enabled():
            for module in first_in_backward:
                cast("FSDPModule", module).unshard()

    site.model.register_forward_hook(gather)
