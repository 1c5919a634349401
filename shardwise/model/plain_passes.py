"""Passes of an objective over a whole step in one process, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Batch, Blueprint
from shardwise.model.lora import adapters_off


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode and makes no graph."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@dataclass(frozen=True)
class PlainPasses:
    """``ForwardOnly`` of a whole model in this process."""

    blueprint: Blueprint
    model: nn.Module
    frozen: Mapping[str, nn.Module]

    def forward_only(
        self, batches: Sequence[Batch], function: Callable[[nn.Module, Batch], Tensor]
    ) -> list[Tensor | None]:
        with in_evaluation(self.model):
            return [function(self.model, batch) for batch in batches]

    def as_before_training(self) -> AbstractContextManager[None]:
        return adapters_off(self.model)

    def global_sum(self, values: Tensor) -> Tensor:
        return values

    def prepared(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of a step as the objective's loss takes them."""
        objective = self.blueprint.minimises
        rows = [objective.rows(batch) for batch in batches]
        return objective.before_step(self, rows) if objective.whole_step else rows
