"""The number of valid targets of a step's global batch, by which the loss of every micro-batch is divided.

Labels tell it before the first pass. A user's own loss tells it with its result, so it is known after the last forward
pass. Until then it is estimated: the targets of the first micro-batch of all ranks, times the number of micro-batches.
The last micro-batch is divided by the estimate too, and then all gradients are corrected. Where every micro-batch has
as many targets, the estimate is exact.

Refused: to divide gradients by the number only afterwards. Gradients of a sum over all targets overflow in 16 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.run import LiveModel, OptimizerStep
from shardwise.model.blueprint import Batch


class Targets(ABC):
    """The targets of one step.

    Attributes:
        number: of the global batch, when the last micro-batch has passed forward.
        divisor: what to divide the loss sum of the micro-batch by that has passed forward; at least 1.
    """

    number: Tensor
    divisor: Tensor

    @abstractmethod
    def passed(self, count: Tensor) -> None:
        """A micro-batch has passed forward, and its loss counted so many targets."""


class LabelledTargets(Targets):
    """Counted from the labels of all micro-batches."""

    def __init__(self, live: LiveModel, batches: Sequence[Batch]) -> None:
        self.number = live.count_targets(batches)
        self.divisor = self.number.clamp(min=1)

    def passed(self, count: Tensor) -> None: ...


class ReturnedTargets(Targets):
    """Counted by the loss of each micro-batch."""

    def __init__(self, live: LiveModel, update: OptimizerStep, micro_batches: int) -> None:
        self._group = live.context.token_group
        self._update = update
        self._micro_batches = micro_batches
        self._passed = 0
        self.number = torch.zeros((), dtype=torch.int64, device=live.device)
        update.correction = None  # that of the last step

    def passed(self, count: Tensor) -> None:
        self._passed += 1
        self.number += count
        if self._passed == 1:
            # A copy: ``number`` is this rank's own sum until the last micro-batch.
            first = self.number.clone()
            # Gradients of the first micro-batch are made now, so all ranks must divide by the same number already.
            dist.all_reduce(first, group=self._group)
            self.divisor = (self._micro_batches * first).clamp(min=1)
            if self._micro_batches == 1:
                self.number = first  # exact: there is nothing to correct
        elif self._passed == self._micro_batches:
            dist.all_reduce(self.number, group=self._group)
            # Gradients were divided by the estimate; this factor makes it the true number.
            self._update.correction = self.divisor.double() / self.number.clamp(min=1)


def targets_of(live: LiveModel, update: OptimizerStep, batches: Sequence[Batch]) -> Targets:
    """The targets of a step with these micro-batches of this rank."""
    if live.blueprint.counts_in_loss:
        return ReturnedTargets(live, update, len(batches))
    return LabelledTargets(live, batches)
