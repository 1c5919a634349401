"""What the ranks of a parity test and of a memory test do.

In a module of their own, because every rank of every run imports the module of its function anew, and the modules of
the tests work out their rows when they are imported.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.recipe import Recipe
from shardwise.engine.build import build
from shardwise.engine.snapshot import Snapshots, snapshots_of
from shardwise.engine.step import step
from shardwise.model import kept
from shardwise.model.blueprint import blueprint_of
from shardwise.model.host import memories_apart
from shardwise.model.lanes import Lanes
from shardwise.technique import MICRO_BATCH_SIZE, micro_batches, strategy_from
from shardwise.technique.offload import parts
from shardwise.train.meter import MemoryMeter
from shardwise.train.verify import Verdict, run_reference, run_strategy
from shardwise.train.warm import warm_kernels


def reference_rank(recipe: Recipe, settings: dict[str, Any], folder: Path) -> None:
    run_reference(recipe, strategy_from(settings), folder)


def strategy_rank(recipe: Recipe, settings: dict[str, Any], folder: Path) -> Verdict:
    """Where host memory holds anything, it is told from the device's: on a CPU nothing would move."""
    strategy, device = strategy_from(settings), torch.device("cpu")
    moved, sent = parts(strategy) - {"nvme"}, _counted_copies()
    with memories_apart(True) if moved else nullcontext():
        verdict = run_strategy(recipe, strategy, folder, device)
    assert bool(sent) == ("activations" in moved), "what is asked for has to happen"
    return verdict


def _counted_copies() -> list[int]:
    """The sizes of activations that go to host memory from here on, however small: of this process alone."""
    sent: list[int] = []
    take = Lanes.take

    def counted(self: Lanes, size: int, device: torch.device) -> Tensor:
        sent.append(size)
        return take(self, size, device)

    Lanes.take, kept.SMALLEST = counted, 1  # type: ignore[method-assign]
    return sent


def measured_rank(recipe: Recipe, settings: dict[str, Any]) -> int:
    """Real steps on random tokens, of a recipe's all but the last; the peak above the level before the model."""
    device, strategy = torch.device("cpu"), strategy_from(settings)
    blueprint = blueprint_of(recipe)
    warm_kernels(device, strategy)
    meter = MemoryMeter(device)
    run = build(recipe, blueprint, strategy, device)
    snapshots: Snapshots[int] | None = snapshots_of(run)
    if snapshots is not None:
        snapshots.begin(0)
    count = micro_batches(strategy, run.layout, recipe.batch_size)
    shape = (strategy[MICRO_BATCH_SIZE], recipe.data.sequence_length)
    for index in range(recipe.steps - 1):
        read = len(run.passes.reads(index, recipe.steps))
        tokens = [torch.randint(0, 2048, shape) for _ in range(read * count)]
        step(run, [{"input_ids": t, "labels": t} for t in tokens], 1e-4)
        meter.sample()
    return meter.peak.allocated
