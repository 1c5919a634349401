"""The training loop: build, restore, and step after step until done. It names no technique.

Results of a step are read one step late, so that the device is never idle while the host prints.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.core.errors import NumericsError, RecipeError
from shardwise.core.plan import Plan
from shardwise.core.recipe import Recipe
from shardwise.engine.build import Run, build
from shardwise.engine.schedule import multiplier
from shardwise.engine.step import StepResult, step
from shardwise.model.blueprint import Batch, Blueprint, blueprint_of
from shardwise.technique import MICRO_BATCH_SIZE
from shardwise.train.checkpoint import restore, save
from shardwise.train.data import Data, open_data
from shardwise.train.evaluate import evaluate
from shardwise.train.meter import EXACT_STEPS, MemoryMeter, return_large_frees
from shardwise.train.metrics import MetricsFile, StepMetrics, typical_seconds
from shardwise.train.progress import Progressing
from shardwise.train.state import TrainState
from shardwise.train.warm import warm_kernels


@dataclass
class Job:
    """One training job as one rank sees it."""

    recipe: Recipe
    plan: Plan
    folder: Path
    device: torch.device
    exact_memory: bool = False


@dataclass
class _Pending:
    """A step whose results have not been read from the device yet."""

    index: int
    result: StepResult
    learning_rate: float
    seconds: float


class Trainer:
    """Runs one job to its end."""

    def __init__(self, job: Job) -> None:
        recipe, self.job = job.recipe, job
        self.blueprint: Blueprint = blueprint_of(recipe)
        self.data: Data = open_data(recipe, self.blueprint.dataset)
        _require_vocabulary(self.blueprint, self.data)
        warm_kernels(job.device, job.plan.strategy)
        self.meter = MemoryMeter(job.device)
        self.run: Run = build(recipe, self.blueprint, job.plan.strategy, job.device)
        self.state = restore(self.run, job.folder / "checkpoints", self.data.fingerprint) or TrainState()
        self.rank = dist.get_rank()
        self.started = self.clock = time.perf_counter()
        self.held_out: float | None = None
        if self.rank == 0:
            self.metrics = MetricsFile(job.folder / "metrics.jsonl", self.state.step)
            self.progress = Progressing(recipe.steps, self.state.step)

    def train(self) -> None:
        """All remaining steps, then the report. Raises NumericsError when the loss is no number any more."""
        recipe, first = self.job.recipe, self.state.step
        pending: _Pending | None = None
        for index in range(first, recipe.steps):
            rate = recipe.optimizer.learning_rate * multiplier(recipe.schedule, index, recipe.steps)
            seed_step(recipe.seed, index, self.rank)
            result = step(self.run, self._micro_batches(index), rate)
            self._finish(pending)
            pending = _Pending(index, result, rate, self._lap())
            if index - first < EXACT_STEPS or self.job.exact_memory:
                self.meter.sample()
            if index - first == EXACT_STEPS - 1 and not self.job.exact_memory:
                return_large_frees(False)
            if self._due(index, recipe.evaluation.every) or self._due(index, recipe.checkpoint.every):
                self._pause(pending, index)
                pending = None
        self._finish(pending)
        self._report()

    def _micro_batches(self, index: int) -> list[Batch]:
        size = self.job.plan.strategy[MICRO_BATCH_SIZE]
        return self._placed(self.data.micro_batches(index, self.run.data_rank, self.run.data_degree, size))

    def _placed(self, batches: list[Batch]) -> list[Batch]:
        return [{k: v.to(self.run.device, non_blocking=True) for k, v in batch.items()} for batch in batches]

    def _due(self, index: int, every: int | None) -> bool:
        """Whether something that happens every so many steps (None: at the end) follows step ``index``."""
        done = index + 1
        return done == self.job.recipe.steps or (every is not None and done % every == 0)

    def _finish(self, pending: _Pending | None, held_out: float | None = None) -> None:
        """Read a step's results, record and show them."""
        if pending is None:
            return
        loss, norm, tokens = (float(x) for x in (pending.result.loss, pending.result.grad_norm, pending.result.tokens))
        self.state = TrainState(step=pending.index + 1, tokens=self.state.tokens + int(tokens))
        if self.rank == 0:
            seconds = pending.seconds
            done = StepMetrics(
                pending.index + 1, loss, norm, pending.learning_rate, int(tokens), seconds, tokens / seconds,
                held_out_loss=held_out,
            )
            self.metrics.write(done)
            self.progress.show(done, self.meter.peak.allocated)
        if not math.isfinite(loss):
            raise NumericsError(
                f"loss is {loss}",
                where=f"step {pending.index + 1}",
                why="an overflow or a bad batch; the update has been applied",
                fix="resume from the last checkpoint with a lower learning rate or a higher precision",
            )

    def _pause(self, pending: _Pending, index: int) -> None:
        """Evaluate and save between two steps; neither counts as step time."""
        float(pending.result.loss)
        pending.seconds += self._lap()
        held_out = None
        if self._due(index, self.job.recipe.evaluation.every) and self.data.held_out_sequences:
            size = self.job.plan.strategy[MICRO_BATCH_SIZE]
            batches = self.data.held_out(0, self.run.data_rank, self.run.data_degree, size)
            held_out = self.held_out = evaluate(self.run, self._placed(batches))
        self._finish(pending, held_out)
        if self._due(index, self.job.recipe.checkpoint.every):
            folder = self.job.folder / "checkpoints"
            save(self.run, self.state, folder, self.job.recipe.checkpoint.keep, self.data.fingerprint)
        self.meter.forget()
        self._lap()

    def _lap(self) -> float:
        """Seconds since the last call: of a step when called as soon as it has been issued."""
        before, self.clock = self.clock, time.perf_counter()
        return self.clock - before

    def _report(self) -> None:
        """Predicted beside measured, for every rank."""
        peaks: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(peaks, (self.meter.peak.allocated, self.meter.peak.reserved))
        if self.rank != 0:
            return
        self.progress.close()
        self.metrics.close()
        plan, seconds = self.job.plan, self.metrics.seconds
        report = {
            "ranks": [
                {
                    "rank": rank,
                    "predicted_peak_bytes": plan.predicted_allocated(rank),
                    "measured_peak_bytes": allocated,
                    "measured_reserved_bytes": reserved,
                }
                for rank, (allocated, reserved) in enumerate(peaks)
            ],
            "predicted_step_seconds": plan.step.seconds,
            "measured_step_seconds": typical_seconds(seconds, EXACT_STEPS) if seconds else None,
            "ledger": plan.peak.ledger.as_dict(),
            "held_out_loss": self.held_out,
            "parameters": plan.parameters,
            "tokens": self.state.tokens,
            "seconds": time.perf_counter() - self.started,
            "sample": None,
            "device": plan.device,
            "world_size": plan.world_size,
        }
        (self.job.folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def seed_step(seed: int, index: int, rank: int) -> None:
    """Seed dropout and the like from (seed, step, rank): nothing of the generator needs to be saved."""
    torch.manual_seed((seed * 1_000_003 + index) * 65_537 + rank)


def _require_vocabulary(blueprint: Blueprint, data: Data) -> None:
    """Raise RecipeError when the data has token ids that the model does not know."""
    if blueprint.vocab is not None and data.vocab is not None and data.vocab > blueprint.vocab:
        raise RecipeError(
            f"the model's vocabulary of {blueprint.vocab:,} is too small",
            where="model.vocab",
            why=f"the tokenizer has {data.vocab:,} tokens",
            fix=f"set model.vocab to at least {data.vocab}",
        )
