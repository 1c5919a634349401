"""Recovery from out of memory (OOM): the ranks start again from the last checkpoint with half the micro-batch.

The rank that ran out of memory writes ``oom.json`` and exits with a code that asks for a restart. The other ranks wait
in collectives that this rank never joins, so the launcher ends them. New processes then train the same strategy with
half the micro-batch, from the last checkpoint, or from the start. Steps since the checkpoint are trained again.

The loss of a step is one sum over the samples of its global batch, divided once by the number of targets. The global
batch and the order of samples stay the same, so gradients are equal up to rounding. Only dropout draws other numbers.

Each restart halves the micro-batch, so a size of 2^N allows N restarts. At a micro-batch of 1 the run ends with exit
code 7. Refused: repeating the step in the same processes, which loses no step. It has to break the collectives of all
ranks, replace their process groups and rebuild the model from the state of a step that was cut off.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from shardwise.core.plan import Plan
from shardwise.technique import MICRO_BATCH_SIZE
from shardwise.trainer.faults.oom_record import (
    OomRecord,
    is_oom,
    read_record,
    requested_bytes,
    write_record,
)


def stop_on_oom(
    train: Callable[[], None], folder: Path, plan: Plan, progress: Callable[[], tuple[int, int]]
) -> None:
    """Call ``train``. If this rank runs out of memory, write ``oom.json`` into ``folder`` and raise OutOfMemory.

    Args:
        plan: the plan of the run.
        progress: returns the number of the current step, from 1, and the bytes that this rank holds.

    Raises ResourceError when the record cannot be written.
    """
    try:
        train()
        return
    except Exception as error:
        if not is_oom(error):
            raise
        traceback.print_exc()
        requested = requested_bytes(error)
    # Outside of the handler the error is gone, and with it the activations that its traceback held.
    step, allocated = progress()
    size = plan.strategy[MICRO_BATCH_SIZE]
    half = 0 if size == 1 else -(-size // 2)  # rounded up
    rank = dist.get_rank()
    record = OomRecord(dict(plan.strategy.values), plan.world_size, half, rank, step, allocated, requested)
    # Before this process ends, because the processes that the launcher then starts read it.
    write_record(folder, record)
    raise record.error()


def followed_oom(folder: Path, plan: Plan) -> OomRecord | None:
    """The OOM after which ``plan`` was made; None when it was made without one."""
    record = read_record(folder)
    return record if record is not None and record.led_to(plan.strategy, plan.world_size) else None
