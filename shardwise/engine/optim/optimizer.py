"""``Optimizer``: torch's interface over an update rule, with state from the start and a skip verdict at every step.

State is created with the optimizer, so step 1 has the memory of step 2, and a checkpoint or a dry run needs no warm-up
step. State tensors are sharded as the parameters are, so they are saved, resharded and counted like them.

A verdict is a float32 scalar on the device: 1 leaves parameters, moments and step counts unchanged, 0 updates. It is
not a Python bool, because reading it would be a host sync in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.engine.optim.chunk import Chunk


class UpdateRule(Protocol):
    """How parameters change, given their gradients."""

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Initial state of one parameter."""
        ...

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        states: Sequence[dict[str, Tensor]],
        rate: Rate,
        skip: Tensor,
    ) -> None:
        """Update parameters and states in place, unless ``skip`` is 1."""
        ...

    def update_piece(self, piece: Chunk, rate: Rate, skip: Tensor) -> None:
        """Update weights and moments of some rows in place, unless ``skip`` is 1."""
        ...


@dataclass(frozen=True)
class Rate:
    """Learning rate and weight decay of one update, from the schedule and the parameter group."""

    learning_rate: float
    weight_decay: float


class Optimizer(torch.optim.Optimizer):
    """Updates parameters by one rule. Groups differ in weight decay and in learning rate ratio."""

    def __init__(self, groups: list[dict[str, Any]], rule: UpdateRule) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "rate_ratio": 1.0})
        self._rule = rule
        self._group_of: dict[nn.Parameter, dict[str, Any]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._group_of[parameter] = group
                self.state[parameter] = self.fresh_state(parameter)

    def fresh_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Initial in-memory state of a parameter."""
        return self._rule.state(parameter)

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """All state of a parameter, in any memory, for saving and restoring."""
        return self.state.get(parameter, {})

    def rate_of(self, parameter: nn.Parameter) -> Rate:
        group = self._group_of[parameter]
        return Rate(group["lr"], group["weight_decay"])

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = learning_rate * group["rate_ratio"]

    def step(self, closure: Any = None, *, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "one gradient per step"
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if parameters:
            device = parameters[0].device
            self.update(parameters, torch.zeros((), device=device) if skip is None else skip)

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter], skip: Tensor) -> None:
        """Update some parameters, all of which have gradients."""
        by_group: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_group.setdefault(id(self._group_of[parameter]), []).append(parameter)
        for members in by_group.values():
            self._rule.update(members, [self.state[p] for p in members], self.rate_of(members[0]), skip)
