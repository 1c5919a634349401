"""Passes of an objective over a whole step in one process, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Batch, Blueprint
from shardwise.model.lora import adapters_off


@dataclass(frozen=True)
class PlainPasses:
    """``ForwardOnly`` of a whole model in this process."""

    blueprint: Blueprint
    model: nn.Module
    frozen: Mapping[str, nn.Module]

    def forward_only(
        self, batches: Sequence[Batch], function: Callable[[nn.Module, Batch], Tensor]
    ) -> list[Tensor | None]:
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            results: list[Tensor | None] = [function(self.model, batch) for batch in batches]
        self.model.train(training)
        return results

    def as_before_training(self) -> AbstractContextManager[None]:
        return adapters_off(self.model)

    def global_sum(self, values: Tensor) -> Tensor:
        return values

    def prepared(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of a step as the objective's loss takes them."""
        objective = self.blueprint.minimises
        rows = [objective.rows(batch) for batch in batches]
        return objective.before_step(self, rows) if objective.whole_step else rows
