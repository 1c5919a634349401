"""The training step, written once. Run on real tensors it trains, run on fake tensors it plans.

Forward and backward passes of all micro-batches (forward_backward.py), then one update (optimizer_step.py).

Nothing in here waits for the device: no ``.item()``, no branch on a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.engine.phase import phase
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
        capacity: the room that it is a share of, relative to a balanced load.
        expert_load: tokens of every expert relative to the mean of its layer, fp32 [layers, experts]; None without
            experts, and where ranks are not in the same step.
        measures: sum and count of every measure of the objective, fp64 [measures, 2]; None without measures.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    tokens: Tensor
    loss_scale: Tensor
    capacity_used: Tensor | None = None
    expert_load: Tensor | None = None
    measures: Tensor | None = None
    capacity: float | None = None


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
    scale = run.loss_scale.value.clone()  # finish() changes it in place
    norm, skipped = run.update.finish(loss)
    used = run.update.capacity_used
    load = _expert_load(run, skipped)
    room = None if run.options.capacity is None else run.options.capacity.factor
    return StepResult(loss, norm, skipped, tokens, scale, used, load, run.passes.measures, room)


def _expert_load(run: Run, skipped: Tensor) -> Tensor | None:
    """The load of experts in the step that ends; routers balance it unless the update was left out."""
    counted = run.options.expert_load
    if counted is None or not run.synchronous:
        return None
    with phase("optimizer"):
        load = counted.relative(run.device)
        counted.adjust_biases(load, skipped)
    return load


def loads(run: Run, result: StepResult) -> dict[str, Any]:
    """Measures of the objective, and of a load that depends on the data, as ``StepRecord`` names them.

    Waits for the device.
    """
    measures: dict[str, Any] = {"measures": named_measures(run, result.measures) or None}
    if result.capacity is not None and result.capacity_used is not None:
        measures["load_imbalance"] = float(result.capacity_used) * result.capacity
    if result.expert_load is not None:
        # [layers, experts]. A layer whose tokens are not known is all 0; its experts are not dead for that.
        counted = result.expert_load.any(-1, keepdim=True)
        measures["busiest_expert"] = float(result.expert_load.max())
        measures["dead_experts"] = int(((result.expert_load == 0) & counted).sum())
    return measures


def named_measures(run: Run, sums: Tensor | None) -> dict[str, float]:
    """The means of the objective's measures by name; those without items are left out. Waits for the device."""
    if sums is None:
        return {}
    pairs = zip(run.objective.measures, sums.tolist(), strict=True)
    return {name: total / count for name, (total, count) in pairs if count}
