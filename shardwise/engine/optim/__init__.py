"""The optimizer: its parameter groups and the rule that updates them, chosen by the recipe.

Chosen: torch's fused kernels where the stored weights and moments are plain (``fused.py``), which allocate
nothing beside the moments and can leave everything untouched on the device's own verdict; and rules that go
through a parameter in chunks where torch has no such kernel: weights stored in 16 bits, moments in 8
(``chunked.py``). Both take parameters in any number, so the same object updates after the backward pass or,
parameter by parameter, within it. State that is offloaded goes through the same rules on the processor
(``offloaded.py``).

Refused: a library's optimizer wrapped from outside. None of them can skip an update without waiting for the
device, which is what the guard and loss scaling need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.core.sections import OptimizerSpec
from shardwise.engine.optim.chunked import ChunkedRule
from shardwise.engine.optim.fused import FusedAdamW, FusedSGD
from shardwise.engine.optim.moments import EightBit, Wide
from shardwise.engine.optim.offloaded import HostOptimizer, OffloadedOptimizer, share_of
from shardwise.engine.optim.optimizer import Optimizer, UpdateRule
from shardwise.model.host import apart, host_memory
from shardwise.model.slices import named_parameters
from shardwise.technique.base import StateOffload


def build_optimizer(
    model: nn.Module,
    spec: OptimizerSpec,
    seed: int = 0,
    offload: StateOffload | None = None,
    hosted: bool = False,
    rate_ratio: Callable[[str], float] = lambda name: 1.0,
) -> Optimizer:
    """The recipe's optimizer over the trainable parameters of a materialised model.

    Matrices decay; norms, biases and other vectors do not. ``seed`` is of stochastic rounding. ``hosted`` says
    that the parameters lie in host memory, apart from the device's. ``rate_ratio`` is the learning rate of a
    parameter, by name, over the schedule's.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = groups_of(model, spec.weight_decay, rate_ratio)
    rounded = any(p.dtype in (torch.bfloat16, torch.float16) for p in trainable)
    device = trainable[0].device if trainable else torch.device("cpu")
    if offload is not None and trainable and (hosted or apart(device) or offload.folder is not None):
        with host_memory():
            host_rule = _rule(spec, seed, torch.device("cpu"), rounded)
        if hosted and offload.folder is None:
            return HostOptimizer(groups, host_rule)
        rule = host_rule if hosted else _rule(spec, seed, device, rounded)
        chosen, staged = share_of(trainable, offload.fraction), apart(device) and not hosted
        return OffloadedOptimizer(groups, rule, host_rule, chosen, offload.folder, staged)
    return Optimizer(groups, _rule(spec, seed, device, rounded))


def groups_of(
    model: nn.Module, weight_decay: float, rate_ratio: Callable[[str], float]
) -> list[dict[str, Any]]:
    """The trainable parameters in groups of one weight decay and one ratio of learning rates."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            key = (weight_decay if parameter.ndim >= 2 else 0.0, rate_ratio(name))
            groups.setdefault(key, []).append(parameter)
    return [{"params": held, "weight_decay": k[0], "rate_ratio": k[1]} for k, held in groups.items()]


def _rule(spec: OptimizerSpec, seed: int, device: torch.device, rounded: bool) -> UpdateRule:
    """The rule by name: torch's kernel, or chunks where weights are ``rounded`` to 16 bits or moments to 8."""
    fused: UpdateRule = FusedAdamW(spec.betas, spec.epsilon)
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if spec.name == "sgd":
        fused, names = FusedSGD(spec.momentum), ("momentum",) if spec.momentum else ()
    eight_bit = spec.name == "adamw_8bit"
    if not rounded and not eight_bit:
        return fused
    return ChunkedRule(fused, names, EightBit(device) if eight_bit else Wide(), seed)
