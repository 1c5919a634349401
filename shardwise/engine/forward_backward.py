"""Forward and backward passes of a step, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.phase import micro_batch, phase
from shardwise.engine.run import ForwardBackward, SeesLoss
from shardwise.engine.targets import targets_of
from shardwise.model.blueprint import Batch
from shardwise.model.plain_passes import in_evaluation
from shardwise.runtime.layer_inputs import state_buffers
from shardwise.runtime.parallel.shard_slices import local_part

LEAST = 3
"""Fewest micro-batches whose peak is that of more: the first, one like all others, and the last."""


class Sequential(ForwardBackward):
    """Each micro-batch's backward pass follows its forward pass."""

    def _share_buffers(self) -> None:
        """Give every rank rank 0's buffers that forward passes may read: then no save or evaluation changes a step.

        Which of them the last step has written, ranks may not agree on.
        """
        if self._live.blueprint.objective is None and dist.get_world_size() > 1:
            for buffer in state_buffers(self._live.model):
                dist.broadcast(local_part(buffer), 0)

    def forward_backward(
        self, batches: Sequence[Batch], sees_loss: SeesLoss | None = None
    ) -> tuple[Tensor, Tensor]:
        live = self._live
        self._share_buffers()
        with phase("forward"):
            batches = list(live.local_batches(self, batches))
            targets = targets_of(live, self._update, batches)
            total = torch.zeros((), dtype=torch.float64, device=live.device)
        with self._measured():
            for index, batch in enumerate(batches):
                last = index == len(batches) - 1
                with micro_batch(index):
                    for before_micro_batch in live.options.micro_batch_hooks:
                        before_micro_batch(last, 0)
                    with phase("forward"):
                        loss_sum, count = live.loss(batch)
                        # Without detach the sum would keep the graph of every micro-batch.
                        total += loss_sum.detach()
                        targets.passed(count)
                    if sees_loss is not None:
                        sees_loss(loss_sum)
                    with phase("backward"):
                        self._update.before_backward(total, last)
                        # By the targets of the global batch, so gradients of micro-batches and ranks only have to
                        # be added.
                        (loss_sum / targets.divisor * live.loss_scale.value).backward()
        with phase("backward"):
            for after_backward in live.options.backward_hooks:
                after_backward()
            self._update.after_backward()
        dist.all_reduce(total, group=live.context.token_group)
        return targets.number, total / targets.number.clamp(min=1)

    def representative_count(self, count: int, limit: int | None = None) -> int:
        return min(count, LEAST if limit is None else limit)

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        live = self._live
        total = torch.zeros(2, dtype=torch.float64, device=live.device)  # [loss sum, valid targets]
        with self._measured():
            for batch in live.local_batches(self, batches):
                loss, count = live.loss(batch)
                total += torch.stack([loss.double(), count.double()])
        dist.all_reduce(total, group=live.context.token_group)
        return total

    def forward_only(
        self, batches: Sequence[Batch], function: Callable[[nn.Module, Batch], Tensor]
    ) -> list[Tensor | None]:
        results: list[Tensor | None] = []
        with in_evaluation(self._live.model):
            for index, batch in enumerate(batches):
                with micro_batch(index):
                    results.append(function(self._live.model, batch))
        return results
