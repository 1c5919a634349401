"""Forward and backward passes of all micro-batches of a step: one after the other, or by a pipeline's schedule.

The loss of a step is the sum over all valid targets of the global batch divided by their number: counts are
summed over micro-batches and all-reduced over data-parallel ranks *before* the first backward pass, and each
micro-batch's loss sum is divided by that one number. Any split of a batch over micro-batches and ranks thus
gives the same gradient. Refused: a mean of means, which weighs short micro-batches too much, and dividing
the gradients afterwards, which lets sums overflow in 16 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.phase import micro_batch, phase
from shardwise.model.blueprint import Batch

if TYPE_CHECKING:
    from shardwise.engine.build import Run

SeesLoss = Callable[[Tensor], None]
"""Called with the loss sum of every micro-batch between its two passes."""


LEAST = 3
"""The first micro-batch, one like all others, and the last."""


class Passes(ABC):
    """How the micro-batches of a step run through the model. Collective: all ranks call alike.

    Attributes:
        in_step: whether all ranks are within one step at the same time; else they meet only where the run pauses.
    """

    in_step = True

    @property
    def kept(self) -> list[Tensor]:
        """Further copies of weights that are held between steps."""
        return []

    def reads(self, index: int, steps: int) -> range:
        """Of which steps a run of ``steps`` must bring the samples to its step ``index``, all in one list."""
        return range(index, index + 1)

    @abstractmethod
    def forward_backward(
        self, run: Run, batches: Sequence[Batch], sees_loss: SeesLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        """Accumulate the scaled gradient of the mean loss; (valid targets, mean loss) of the global batch."""

    @abstractmethod
    def enough(self, count: int) -> int:
        """Of so many micro-batches, how many hold as much at once as all do; with the second like all that lack."""

    @abstractmethod
    def evaluate(self, run: Run, batches: Sequence[Batch]) -> Tensor:
        """[summed loss, valid targets] of all ranks' batches, fp64, without gradients."""


class Sequential(Passes):
    """Each micro-batch's backward pass follows its forward pass."""

    def forward_backward(
        self, run: Run, batches: Sequence[Batch], sees_loss: SeesLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        tokens, total = counted(run, batches)
        divisor = tokens.clamp(min=1)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with micro_batch(index):
                for before_micro_batch in run.micro_batch_hooks:
                    before_micro_batch(last, 0)
                with phase("forward"):
                    loss_sum, _ = run.blueprint.loss(run.model, batch)
                    total += loss_sum.detach()
                if sees_loss is not None:
                    sees_loss(loss_sum)
                with phase("backward"):
                    run.update.before_backward(run, total, last)
                    (loss_sum / divisor * run.loss_scale.value).backward()
        dist.all_reduce(total, group=run.token_group)
        return tokens, total / divisor

    def enough(self, count: int) -> int:
        return min(count, LEAST)

    def evaluate(self, run: Run, batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=run.device)
        for batch in batches:
            loss, count = run.blueprint.loss(run.model, batch)
            total += torch.stack([loss.double(), count.double()])
        dist.all_reduce(total, group=run.token_group)
        return total


def counted(run: Run, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """(valid targets of the global batch, a zero to add losses to)."""
    with phase("forward"):
        tokens = torch.stack([run.blueprint.count(batch) for batch in batches]).sum()
        dist.all_reduce(tokens, group=run.token_group)
        return tokens, torch.zeros((), dtype=torch.float64, device=run.device)
