"""Held-out loss: the same blueprint loss, without gradients, summed over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.engine.build import Run
from shardwise.model.blueprint import Batch


@torch.no_grad()
def evaluate(run: Run, batches: Sequence[Batch]) -> float:
    """Mean loss per valid target over the batches of all data-parallel ranks, in nats; NaN without targets."""
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    run.model.eval()
    for batch in batches:
        loss, count = run.blueprint.loss(run.model, batch)
        total += torch.stack([loss.double(), count.double()])
    run.model.train()
    dist.all_reduce(total, group=run.data_group)
    loss_sum, targets = total.tolist()
    return loss_sum / targets if targets else math.nan
