"""What the ranks of a parity test and of a memory test do.

In a module of their own, because every rank of every run imports the module of its function anew, and the modules of
the tests work out their rows when they are imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.build import build
from shardwise.engine.run import ListedBatches
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.engine.step import step
from shardwise.model.blueprint import Batch
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.offload import activations as kept
from shardwise.runtime.offload.copy_stream import CopyStream
from shardwise.runtime.offload.host import separate_host_memory
from shardwise.technique import MICRO_BATCH_SIZE, micro_batches, precision_of, strategy_from
from shardwise.technique.offload import parts
from shardwise.trainer.meter import MemoryMeter
from shardwise.trainer.warm_up import warm_kernels
from shardwise.verifier.plain_runs import run_plain
from shardwise.verifier.verdict import Verdict
from shardwise.verifier.verify import (
    TOLERANCES,
    exactly,
    rounds_more,
    run_reference,
    run_strategy,
    run_verification,
)

Job = tuple[Recipe, dict[str, Any], Path]
"""A recipe, a strategy's settings, and the folder of the reference."""

AGAINST_FP32 = TOLERANCES | {"fp16": 1e-2, "bf16": 5e-2, "fp8": 1e-1, "adamw_8bit": 5e-2}
"""Largest relative differences from the reference in fp32 (fp64 for fp64), by precision or optimizer.

Of models and learning rates that the tests choose: ``shardwise verify`` measures the noise instead.
"""


def allowed(recipe: Recipe, precision: str) -> float:
    """The tolerance of a parity test."""
    return max(AGAINST_FP32[precision], AGAINST_FP32.get(recipe.optimizer.name, 0.0))


def plain_rank(jobs: list[Job]) -> None:
    """What ``shardwise verify`` trains before the strategy."""
    for recipe, settings, folder in jobs:
        strategy = strategy_from(settings)
        if rounds_more(recipe, strategy):
            run_plain(recipe, strategy, folder, torch.device("cpu"))
            recipe, strategy, _ = exactly(recipe, strategy)
        run_reference(recipe, strategy, folder)


def verified_rank(jobs: list[Job]) -> list[Verdict]:
    """The verdict of ``shardwise verify`` on every strategy, one after the other."""
    return [
        run_verification(recipe, strategy_from(settings), folder, torch.device("cpu"))
        for recipe, settings, folder in jobs
    ]


def reference_rank(jobs: list[Job]) -> None:
    for recipe, settings, folder in jobs:
        run_reference(recipe, strategy_from(settings), folder)


def strategy_rank(jobs: list[Job]) -> list[Verdict]:
    """The verdict on every strategy, one after the other.

    Host memory counts as separate memory where a strategy moves something to it: on a CPU nothing would move.
    """
    verdicts = []
    for recipe, settings, folder in jobs:
        strategy = strategy_from(settings)
        moved = parts(strategy) - {"nvme"}
        with counted_copies() as sent, separate_host_memory(bool(moved)):
            tolerance = allowed(recipe, precision_of(strategy))
            verdicts.append(run_strategy(recipe, strategy, folder, torch.device("cpu"), tolerance))
        assert bool(sent) == ("activations" in moved), f"activations moved: {bool(sent)}, asked: {moved}"
    return verdicts


@contextmanager
def counted_copies(smallest: int = 1) -> Iterator[list[int]]:
    """The sizes of the activations that this process copies to host memory; those below ``smallest`` bytes stay."""
    sent: list[int] = []
    before = CopyStream.take, kept.SMALLEST
    take = CopyStream.take

    def counted(self: CopyStream, size: int, device: torch.device) -> Tensor:
        sent.append(size)
        return take(self, size, device)

    CopyStream.take, kept.SMALLEST = counted, smallest  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        CopyStream.take, kept.SMALLEST = before  # type: ignore[method-assign]


def measured_rank(recipe: Recipe, settings: dict[str, Any]) -> int:
    """Real steps on random tokens, of a recipe's all but the last; the peak above the level before the model."""
    device, strategy = torch.device("cpu"), strategy_from(settings)
    blueprint = blueprint_of(recipe)
    warm_kernels(device, strategy, recipe.optimizer if recipe.optimizer.factory else None)
    meter = MemoryMeter(device)
    run = build(recipe, blueprint, strategy, device)
    snapshots: Snapshots[int] | None = snapshots_of(run)
    if snapshots is not None:
        snapshots.begin(0)
    count = micro_batches(strategy, run.layout, recipe.batch_size)
    shape = (strategy[MICRO_BATCH_SIZE], recipe.data.sequence_length)

    def batches() -> list[Batch]:
        tokens = [torch.randint(0, 2048, shape) for _ in range(count)]
        return [{"input_ids": t, "labels": t} for t in tokens]

    source = ListedBatches([batches() for _ in range(recipe.steps)])
    run.passes.begin(source, 0)
    for index in range(recipe.steps - 1):
        step(run, source.micro_batches(index), 1e-4)
        meter.sample()
    dist.barrier()  # PipeDream's last messages leave while the run lives
    return meter.peak.allocated
