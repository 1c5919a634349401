"""The training step, written once. Run on real tensors it trains, run on fake tensors it plans.

The loss of a step is the sum over all valid targets of the global batch divided by their number: counts are
summed over micro-batches and all-reduced over data-parallel ranks *before* the first backward pass, and each
micro-batch's loss sum is divided by that one number. Any split of a batch over micro-batches and ranks thus
gives the same gradient. Refused: a mean of means, which weighs short micro-batches too much, and dividing
the gradients afterwards, which lets sums overflow in 16 bits.

Nothing in here waits for the device: no ``.item()``, no branch on a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.build import Run
from shardwise.engine.phase import phase
from shardwise.model.blueprint import Batch


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step yielded; scalars on the device, equal on all ranks.

    Attributes:
        loss: mean over the valid targets of the global batch, in nats, whatever was skipped.
        grad_norm: of the unscaled gradient, before clipping.
        tokens: valid targets.
        skipped: 1 when the update was left out because the loss or a gradient was not finite, else 0.
        loss_scale: the factor this step's loss was scaled by.
    """

    loss: Tensor
    grad_norm: Tensor
    tokens: Tensor
    skipped: Tensor
    loss_scale: Tensor


def step(run: Run, batches: Sequence[Batch], learning_rate: float) -> StepResult:
    """One optimizer step over this rank's micro-batches, which must be as many on every rank."""
    run.optimizer.set_learning_rate(learning_rate)
    scale = run.loss_scale.value.clone()
    tokens, loss = forward_backward(run, batches)
    grad_norm, skipped = run.update.finish(run, loss)
    return StepResult(loss, grad_norm, tokens, skipped, scale)


def forward_backward(run: Run, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Accumulate the scaled gradient of the mean loss; (valid targets, mean loss) of the global batch."""
    with phase("forward"):
        tokens = torch.stack([run.blueprint.count(batch) for batch in batches]).sum()
        dist.all_reduce(tokens, group=run.data_group)
        divisor = tokens.clamp(min=1)
        total = torch.zeros((), dtype=torch.float64, device=run.device)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        for before_micro_batch in run.micro_batch_hooks:
            before_micro_batch(last)
        with phase("forward"):
            loss_sum, _ = run.blueprint.loss(run.model, batch)
            total += loss_sum.detach()
        with phase("backward"):
            run.update.before_backward(run, total, last)
            (loss_sum / divisor * run.loss_scale.value).backward()
    dist.all_reduce(total, group=run.data_group)
    return tokens, total / divisor
