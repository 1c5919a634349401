"""``Optimizer``: torch's interface over an update rule, with state from the start and a skip verdict at every step.

State is created with the optimizer, so step 1 has the memory of step 2, and a checkpoint or a dry run needs no warm-up
step. State tensors are sharded as the parameters are, so they are saved, resharded and counted like them.

A verdict is a float32 scalar on the device: 1 leaves parameters, moments and step counts unchanged, 0 updates. It is
not a Python bool, because reading it would be a host sync in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.engine.optim.chunk import Chunk, whole


class UpdateRule(Protocol):
    """How parameters change, given their gradients."""

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Initial state of one parameter."""
        ...

    def update(self, chunks: Sequence[Chunk], rate: Rate, skip: Tensor) -> None:
        """Update weights and states in place, unless ``skip`` is 1."""
        ...


@dataclass(frozen=True)
class Rate:
    """Learning rate and weight decay of one update, from the schedule and the parameter group."""

    learning_rate: float
    weight_decay: float


class Optimizer(torch.optim.Optimizer):
    """Updates parameters by one rule. Groups differ in weight decay and in learning rate ratio.

    Attributes:
        learning_rate: of the next update, where the ratio is 1.
    """

    learning_rate = 0.0

    def __init__(self, groups: list[dict[str, Any]], rule: UpdateRule) -> None:
        super().__init__(groups, {"weight_decay": 0.0, "rate_ratio": 1.0})
        self._rule = rule
        self._group_of: dict[nn.Parameter, dict[str, Any]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._group_of[parameter] = group
                # Now, not at the first step as torch's optimizers do: the dry run counts state that exists.
                self.state[parameter] = self.fresh_state(parameter)

    def fresh_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Initial in-memory state of a parameter."""
        return self._rule.state(parameter)

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """All state of a parameter, in any memory, for saving and restoring."""
        return self.state.get(parameter, {})

    def start(self) -> None:
        """Called before the first step, when the weights have their initial values."""

    def loaded(self) -> None:
        """Called when the tensors of ``stored`` have been written, by a checkpoint or a snapshot."""

    def rate_of(self, parameter: nn.Parameter) -> Rate:
        group = self._group_of[parameter]
        return Rate(self.learning_rate * group["rate_ratio"], group["weight_decay"])

    def step(self, skip: Tensor) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self.update([p for group in self.param_groups for p in group["params"] if p.grad is not None], skip)

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter], skip: Tensor) -> None:
        """Update some parameters, all of which have gradients."""
        # Not sorted by rate: parameters of a group come in a row, and one call of the rule updates all of them.
        for rate, members in groupby(parameters, key=self.rate_of):
            self._rule.update([whole(p, self.state[p]) for p in members], rate, skip)
