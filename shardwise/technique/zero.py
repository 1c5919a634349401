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
crosses the groups.

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
forward pass, 2 GiB for Llama-3-8B. The price is that this one reduction is not hidden.

Refused: DistributedDataParallel for stage 0 (its C++ reducer does not run on fake tensors, so it could not
be planned by the code that trains). The price is one copy of each layer's weights at a time, freed after
use, and a memory copy per layer and pass that is small against the layer's matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from shardwise.core.strategy import Case, Layout, Rule, Setting, Strategy
from shardwise.technique.base import DATA_AXES, Site

if TYPE_CHECKING:
    from torch import nn
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
    return case.world_size % case.strategy[REPLICATE] != 0


def _nearest_replicate(case: Case) -> Mapping[str, object]:
    return {"replicate": _divisor_at_most(case.world_size, case.strategy[REPLICATE])}


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

    def degrees(self, strategy: Strategy, world_size: int) -> dict[str, int]:
        """``replicate`` only; ``shard`` is what all techniques leave. Stage 0 is a shard degree of 1."""
        if strategy[ZERO_STAGE] == 0:
            return {"replicate": world_size, "shard": 1}
        return {"replicate": strategy[REPLICATE]}

    def label(self, strategy: Strategy, layout: Layout) -> str:
        shard, replicate = layout.degree("shard"), layout.degree("replicate")
        if strategy[ZERO_STAGE] == 0:
            return f"zero0×{replicate}"
        copies = f"×{replicate} copies" if replicate > 1 else ""
        return f"zero{strategy[ZERO_STAGE]}×{shard}{copies}"

    def apply(self, site: Site) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        stage = site.strategy[ZERO_STAGE]
        hybrid = site.layout.degree("replicate") > 1
        # A one-dimensional mesh where there is nothing to replicate: FSDP2 would otherwise hold
        # all-reduce buffers for a group of one.
        mesh = site.mesh[DATA_AXES] if hybrid else site.mesh["shard"]
        policy = MixedPrecisionPolicy(
            param_dtype=site.dtypes.compute if site.dtypes.compute != site.dtypes.storage else None,
            reduce_dtype=site.dtypes.reduce,
        )
        pinned = site.mesh.device_type != "cpu"
        shards = CPUOffloadPolicy(pin_memory=pinned) if site.weights_on_host else OffloadPolicy()
        # Stage 0 has nothing to gather over the wire: its layer copies are freed after use, as stage 3's.
        reshard = stage in (0, 3)
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
        root = cast("FSDPModule", site.model)
        if stage == 3:
            _gather_ahead(site)

        def before_micro_batch(last: bool) -> None:
            if stage in (0, 1):
                root.set_requires_gradient_sync(last)
            elif hybrid:
                root.set_requires_all_reduce(last)
            if stage in (1, 2):
                root.set_reshard_after_backward(last)

        site.micro_batch_hooks.append(before_micro_batch)


def _gather_ahead(site: Site) -> None:
    """After the forward pass, gather what the backward pass needs first: the root, the head and the last unit."""
    import torch

    first_in_backward = [site.model, *site.head[:1], *site.units[-1:]]

    def gather(*_: object) -> None:
        if torch.is_grad_enabled():
            for module in first_in_backward:
                cast("FSDPModule", module).unshard()

    site.model.register_forward_hook(gather)
