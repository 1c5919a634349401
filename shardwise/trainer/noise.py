"""Measures the gradients of micro-batches between two steps, for the gradient noise scale (``evaluation.noise_scale``).

The batch of the next step is passed through the model twice: each micro-batch alone, then all together. Nothing is
updated, so the run is the same with and without it, bit for bit. A measurement takes the time of two steps, and no more
memory than a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, harmonic_mean

import torch.distributed as dist

from shardwise.core.run_files import GradientNoise
from shardwise.engine.optim.norm import square_sum
from shardwise.engine.run import Run
from shardwise.model.blueprint import Batch


def gradient_noise(run: Run, batches: Sequence[Batch]) -> GradientNoise:
    """Squared gradient norms of each micro-batch, on average, and of all together. Collective.

    The mean of |G|^2 + S / b over micro-batches of b targets has the mean of 1 / b, so their size is the harmonic mean.
    Micro-batches without a target are left out: they have no gradient.

    Args:
        batches: this rank's micro-batches of one step. A micro-batch is that of all data-parallel ranks together.
    """
    measured = [_gradient(run, [batch]) for batch in batches]
    counted = [(square, tokens) for square, tokens in measured if tokens]
    square, tokens = _gradient(run, batches)
    # These passes belong to no step: routers must not react to the tokens that experts got in them.
    if (load := run.options.expert_load) is not None:
        load.forget()
    return GradientNoise(
        micro_batch_tokens=harmonic_mean(tokens for _, tokens in counted) if counted else 0.0,
        batch_tokens=tokens,
        micro_batch_square=fmean(square for square, _ in counted) if counted else 0.0,
        batch_square=square,
    )


def _gradient(run: Run, batches: Sequence[Batch]) -> tuple[float, int]:
    """The squared norm of the gradient of the mean loss of these micro-batches, and their valid targets."""
    with run.update.suspended():
        tokens, _ = run.passes.forward_backward(batches)
        while run.exceeded():  # the room of experts; the gradients of this pass lack some tokens
            run.optimizer.zero_grad(set_to_none=True)
            tokens, _ = run.passes.forward_backward(batches)
    square = square_sum(run.own_parameters(), run.device, run.ranks_of)
    dist.all_reduce(square, group=run.verdict_group)
    run.optimizer.zero_grad(set_to_none=True)
    # The gradients are scaled as the loss is, so their squares are by the square of the scale.
    return float(square / run.loss_scale.value**2), int(tokens)
