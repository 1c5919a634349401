"""The optimizer: parameter groups, and the update rule that the recipe chooses.

Weights and moments in fp32 use torch's fused kernels (``fused.py``). These allocate no memory and can skip an update on
the device. 16-bit weights and 8-bit moments have no such kernel; their rules go through a parameter in chunks of rows
(``chunked.py``). Both take any number of parameters, so the same object updates after the backward pass or, parameter
by parameter, within it. Offloaded state uses the same rules on the CPU (``offloaded.py``).

Library optimizers cannot skip an update without a host sync, which the guard and loss scaling need. ``library.py`` runs
them nevertheless, where the recipe names one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.engine.optim.chunked import ChunkedRule
from shardwise.engine.optim.fused import FusedAdamW, FusedSGD
from shardwise.engine.optim.moment_storage import EightBit, Wide
from shardwise.engine.optim.offloaded import HostOptimizer, OffloadedOptimizer, share_of
from shardwise.engine.optim.optimizer import Optimizer, UpdateRule
from shardwise.engine.optim.trial import library_optimizer
from shardwise.recipe.sections import OptimizerSpec
from shardwise.runtime.offload.host import has_separate_host_memory, host_memory
from shardwise.runtime.parallel.shard_slices import named_parameters
from shardwise.technique.site import StateOffload


def build_optimizer(
    model: nn.Module,
    spec: OptimizerSpec,
    seed: int = 0,
    offload: StateOffload | None = None,
    hosted: bool = False,
    rate_ratio: Callable[[str], float] = lambda name: 1.0,
    ranks: int = 1,
    staged: bool = False,
) -> Optimizer:
    """The recipe's optimizer over the trainable parameters of a materialised model.

    Weight decay applies to matrices, not to norms, biases and other vectors. ``seed`` seeds stochastic rounding.
    ``hosted``: the parameters are in host memory, separate from device memory. ``rate_ratio`` is a parameter's learning
    rate, by name, relative to the schedule's. ``ranks`` and ``staged``: see ``library_optimizer``.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if spec.factory is not None:
        named = {name: p for name, p in named_parameters(model) if p.requires_grad}
        return library_optimizer(named, spec, ranks, staged)
    groups = groups_of(model, spec.weight_decay, rate_ratio)
    rounded = any(p.dtype in (torch.bfloat16, torch.float16) for p in trainable)
    device = trainable[0].device if trainable else torch.device("cpu")
    if offload is None or not trainable:
        return Optimizer(groups, _rule(spec, seed, device, rounded))
    if not (hosted or has_separate_host_memory(device) or offload.folder is not None):
        # Device memory is host memory, and there is no disk: offload has nowhere to go.
        return Optimizer(groups, _rule(spec, seed, device, rounded))
    with host_memory():
        host_rule = _rule(spec, seed, torch.device("cpu"), rounded)
    if hosted and offload.folder is None:
        # Weights, gradients and state are in one memory: there is nothing to stage.
        return HostOptimizer(groups, host_rule)
    rule = host_rule if hosted else _rule(spec, seed, device, rounded)
    chosen = share_of(trainable, offload.fraction)
    copies = has_separate_host_memory(device) and not hosted
    return OffloadedOptimizer(groups, rule, host_rule, chosen, offload.folder, staged=copies)


def groups_of(
    model: nn.Module, weight_decay: float, rate_ratio: Callable[[str], float]
) -> list[dict[str, Any]]:
    """Group the trainable parameters by weight decay and learning rate ratio."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            key = (weight_decay if parameter.ndim >= 2 else 0.0, rate_ratio(name))
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": k[0], "rate_ratio": k[1]} for k, parameters in groups.items()
    ]


def _rule(spec: OptimizerSpec, seed: int, device: torch.device, rounded: bool) -> UpdateRule:
    """The rule by name: torch's kernel, or chunks for weights ``rounded`` to 16 bits or 8-bit moments."""
    fused: UpdateRule = FusedAdamW(spec.betas, spec.epsilon)
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if spec.name == "sgd":
        fused = FusedSGD(spec.momentum)
        names = ("momentum",) if spec.momentum else ()  # plain SGD keeps no moment
    eight_bit = spec.name == "adamw_8bit"
    if not rounded and not eight_bit:
        return fused
    return ChunkedRule(fused, names, EightBit(device) if eight_bit else Wide(), seed)
