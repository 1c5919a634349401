"""The training step, written once. Run on real tensors it trains, run on fake tensors it plans.

Passes of all micro-batches (passes.py), then one update (update.py).

Nothing in here waits for the device: no ``.item()``, no branch on a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.engine.build import Run
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
    return run.passes.forward_backward(run, [run.part_of(batch) for batch in batches])
