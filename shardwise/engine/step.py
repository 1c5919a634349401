"""The training step, written once. Run on real tensors it trains, run on fake tensors it plans.

Forward and backward passes of all micro-batches (forward_backward.py), then one update (optimizer_step.py).

Nothing in here waits for the device: no ``.item()``, no branch on a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.engine.run import Run
from shardwise.model.blueprint import Batch


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step yielded; scalars on the device, equal on all ranks.

    Attributes:
        loss: mean over the valid targets of the global batch, in nats, whatever was skipped.
        grad_norm: of the unscaled gradient, before clipping.
        skipped: 1 when the update was left out because the loss or a gradient was not finite, else 0.
        tokens: valid targets.
        loss_scale: the factor this step's loss was scaled by.
        capacity_used: the largest share of ``EngineOptions.capacity`` that a rank used; above 1 the step is void and
            must be run again. None without a capacity.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    tokens: Tensor
    loss_scale: Tensor
    capacity_used: Tensor | None = None


def step(run: Run, batches: Sequence[Batch], learning_rate: float, skip: Tensor | None = None) -> StepResult:
    """One optimizer step.

    Args:
        batches: this rank's micro-batches. Every rank must have the same number.
        skip: 1 on all ranks leaves the update out, 0 does not.
    """
    run.optimizer.learning_rate = learning_rate
    run.update.skip = skip
    return end_step(run, *run.passes.forward_backward(batches))


def end_step(run: Run, tokens: Tensor, loss: Tensor) -> StepResult:
    """From the gradients of a step, its valid targets and its mean loss to the update."""
    scale = run.loss_scale.value.clone()
    norm, skipped = run.update.finish(loss)
    return StepResult(loss, norm, skipped, tokens, scale, run.update.capacity_used)


def enlarged(run: Run, used: Tensor | None) -> str:
    """Enlarge the capacity if a step exceeded it and must be run again; the change in words, "" if it did not.

    Waits for the device.
    """
    capacity = run.options.capacity
    if capacity is None or used is None or float(used) <= 1:
        return ""
    run.update.void = None
    return capacity.enlarge(float(used))


def exceeded(run: Run) -> bool:
    """Whether passes without an update exceeded the capacity, which is then enlarged. Waits for the device."""
    if run.options.capacity is None:
        return False
    run.update.see_capacity()
    return bool(enlarged(run, run.update.capacity_used))


def imbalance_of(run: Run, result: StepResult) -> float | None:
    """The load of the busiest rank relative to a balanced one; None without a capacity. Waits for the device."""
    capacity, used = run.options.capacity, result.capacity_used
    return None if capacity is None or used is None else capacity.imbalance(float(used))
