"""The validation loss: the training loss on held-out data, without gradients, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from shardwise.core import heartbeat
from shardwise.engine.run import Run
from shardwise.engine.run_state import share_buffers
from shardwise.model.blueprint import Batch


@torch.no_grad()
def evaluate(run: Run, batches: Sequence[Batch]) -> float:
    """Mean loss per valid target over the batches of all data-parallel ranks, in nats. NaN without targets."""
    share_buffers(run)
    run.model.eval()
    total = run.passes.evaluate(_Marked(batches))
    run.model.train()
    loss_sum, targets = total.tolist()
    return loss_sum / targets if targets else math.nan


class _Marked(list[Batch]):
    """Batches that count as progress when they are read, one after the other."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            heartbeat.mark()
            yield batch
