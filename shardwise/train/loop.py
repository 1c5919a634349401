"""The training loop: build, restore, and step after step until done. It names no technique.

Results of a step are read one step late, so that the device is never idle while the host prints. What follows
from them when they are bad is the guard's business (``recovery.py``): it may take the run back by an exception,
and the loop then goes on from the state that this brings. When memory runs out on some rank, all of them leave the
step by an exception and repeat it with half the micro-batch (``survival.py``).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.errors import Preempted, RecipeError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.core.recipe import Recipe
from shardwise.core.whole_file import write_whole
from shardwise.engine.build import Run, build
from shardwise.engine.schedule import learning_rate
from shardwise.engine.step import StepResult, step
from shardwise.model.blueprint import Batch, Blueprint, blueprint_of
from shardwise.model.host import to_device
from shardwise.technique import MICRO_BATCH_SIZE, micro_batches
from shardwise.train.checkpoint import restore, save, start
from shardwise.train.data import Data, open_data
from shardwise.train.evaluate import evaluate
from shardwise.train.export import leave
from shardwise.train.folder import REPORT, forget_report
from shardwise.train.meter import EXACT_STEPS, MemoryMeter, return_large_frees
from shardwise.train.metrics import MetricsFile, StepMetrics, typical_seconds
from shardwise.train.progress import Progressing
from shardwise.train.recovery import Observed, Recovery, Rewound
from shardwise.train.shortage import is_shortage, remember
from shardwise.train.state import TrainState
from shardwise.train.stop import StopRequest
from shardwise.train.stopwatch import Stopwatch
from shardwise.train.survival import Standing, Survival, agree, exhausted, shortage_of
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
    part: int
    stop: Tensor
    learning_rate: float
    seconds: float


class _Spoiled(Exception):
    """A result is garbage, because another rank ran out of memory."""


class Trainer:
    """Runs one job to its end."""

    def __init__(self, job: Job) -> None:
        recipe, self.job = job.recipe, job
        self.rank = dist.get_rank()
        self.stopping = StopRequest(job.device)
        self.blueprint: Blueprint = blueprint_of(recipe)
        self.data: Data = open_data(recipe, self.blueprint.dataset)
        _require_vocabulary(self.blueprint, self.data)
        warm_kernels(job.device, job.plan.strategy)
        # Builds on the meta device: what a model's code imports must lie below the level, as warm kernels do.
        self.blueprint.parameter_count()
        self.meter = MemoryMeter(job.device)
        self.run: Run = build(recipe, self.blueprint, job.plan.strategy, job.device)
        self.checkpoints = job.folder / "checkpoints"
        self.state = self._first_state()
        self.recovery = Recovery(self.run, self.data, job.folder, self._at, _warn)
        self.survival = Survival(self.run)
        self.stopwatch = Stopwatch()
        self.pending: _Pending | None = None
        self.save_owed = False
        self.first = self.state.step
        self.started = self.clock = time.perf_counter()
        self.held_out: float | None = None
        if self.rank == 0:
            self.metrics = MetricsFile(job.folder / "metrics.jsonl", self.state.step)
            self.progress = Progressing(recipe.steps, self.state.step)

    def train(self) -> None:
        """All remaining steps, then the report.

        Raises NumericsError when the guard gives up, Preempted when asked to stop and saved.
        """
        steps = self.job.recipe.steps
        if self.first >= steps:
            _say(self.rank, f"nothing to do: {self.first} of {steps} steps are done")
            self.survival.alarm.close()
            return
        if self.rank == 0:
            forget_report(self.job.folder)
        self.recovery.begin(self.state)
        try:
            self._to_the_end()
        finally:
            self.survival.alarm.close()
        self._report()

    def _to_the_end(self) -> None:
        """Step after step, again and again from where the run was taken back to."""
        while self.state.step < self.job.recipe.steps:
            standing = None
            try:
                self._steps()
            except Rewound as back:
                self._back_at(back.state)
            except Exception as error:
                told = isinstance(error, ShardwiseError) and not is_shortage(error)
                if told or not self.survival.alarm.met(error):
                    raise
                standing = self._standing()
            # Outside of the handler: while an error is handled, its frames are not free.
            if standing is not None:
                self._survive(standing)

    def _steps(self) -> None:
        """Step after step to the end of the run."""
        recipe, left = self.job.recipe, self.pending
        if left is not None and self._pauses(left.index):
            self._pause(left, stop=False)  # an evaluation broke off
        for index in range(self.state.step + (self.pending is not None), recipe.steps):
            rate = learning_rate(recipe, index)
            seed_step(recipe.seed, index, self.run.random_rank)
            self.survival.alarm.enter()
            ahead = self.run.passes.reads(index, recipe.steps)
            batches = [batch for read in ahead for batch in self._at(self.state.position(read))]
            with self.stopwatch.over(self.run, index, self.first):
                result = step(self.run, batches, rate)
            part = self.survival.alarm.part
            now = _Pending(index, result, part, self._asked_to_stop(index), rate, self._lap())
            before, self.pending = self.pending, now
            self.run.update.begun = False
            stop = self._finish(before)
            self._measure(index - self.first)
            if stop or self._pauses(index):
                self._pause(now, stop)

    def _asked_to_stop(self, index: int) -> Tensor:
        """1 where some rank was asked to. Ranks that are not in one step ask each other only where the run pauses."""
        together = self.run.passes.in_step or self._pauses(index)
        return self.stopping.agreed() if together else torch.zeros(())

    def _back_at(self, state: TrainState) -> None:
        """The run stands where it stood before; a result that has not been read is of what was undone."""
        self.state, self.pending, self.save_owed = state, None, False
        self._lap()

    # ---- when memory runs out -----------------------------------------------------------------------------

    def _standing(self) -> Standing:
        """This rank's part in what all of them have to decide."""
        alarm, update, pending = self.survival.alarm, self.run.update, self.pending
        ahead = update.begun
        if pending is not None and alarm.spoils(pending.part):
            ahead, pending, self.pending = True, None, None
        own = alarm.own
        short = own is not None and alarm.spoils(own.part) and not alarm.spoils(own.part - 1)
        # Of ranks that are not in one step another may have finished an update that nobody can hold off any more.
        held_off = update.voidable and self.run.passes.in_step
        if self.run.device.type == "cuda" and held_off and not short:
            ahead = False
        return Standing(
            step=self.state.step + (pending is not None),
            rewinds=self.state.rewinds,
            ahead=ahead,
            copy=self.recovery.newest_copy(self.state.step),
            short=short,
            held_bytes=self.meter.reached().allocated,
            asked_bytes=own.asked_bytes if own is not None else 0,
        )

    def _survive(self, standing: Standing) -> None:
        """Go on with half the micro-batch. Raises ResourceError at a micro-batch of 1."""
        everyone = self.survival.meet(standing)
        short = shortage_of(self.run, self.job.plan.world_size, everyone)
        if self.rank == 0:
            remember(self.job.folder, short)
        if short.exhausted:
            self.recovery.log("out of memory", short.step - 1, [], rank=short.rank, micro_batch_size=1)
            raise exhausted(short)
        strategy = self.survival.again(everyone, short)
        self.job.plan = replace(self.job.plan, strategy=strategy)
        if self.pending is not None:
            self.pending.part = 0  # of before the new alarm's first
        position = self.state.position(short.step - 1)
        back = ""
        if not agree(everyone):
            self._go_back(everyone)
            back = f"; in the midst of an update, so the run goes back to step {self.state.step}"
        self.first = self.state.step + (self.pending is not None)
        sizes = {"micro_batch_size": short.micro_batch_size, "to_step": self.first}
        self.recovery.log("out of memory", short.step - 1, [position], rank=short.rank, **sizes)
        passes = micro_batches(strategy, self.run.layout, self.job.recipe.batch_size)
        _say(
            self.rank,
            f"out of memory on rank {short.rank} in step {short.step}: micro_batch_size is now"
            f" {short.micro_batch_size}, accumulated {passes} times{back}",
        )
        self.meter.begin_again()
        self._lap()

    def _go_back(self, everyone: list[Standing]) -> None:
        """To the newest snapshot that all ranks have, else to where a resume would start."""
        steps = [each.copy for each in everyone if each.copy is not None]
        if len(steps) == len(everyone):
            state = self.recovery.restore_copy(min(steps))
        else:
            state = self._first_state()
            self.recovery.begin_again(state)
        if len({each.rewinds for each in everyone}) == 1:
            # What the guard has left out since stays so: the copy knows nothing of it.
            state = replace(state, rewinds=self.state.rewinds, left_out=self.state.left_out)
        self._back_at(state)
        if self.rank == 0:
            seconds = self.metrics.seconds
            self.metrics.close()
            self.metrics = MetricsFile(self.job.folder / "metrics.jsonl", state.step)
            self.metrics.seconds = seconds

    def _first_state(self) -> TrainState:
        """From the run's own newest checkpoint, else from that of another run, else from nothing."""
        recipe, source = self.job.recipe, self.job.recipe.checkpoint.start_from
        state = restore(self.run, self.checkpoints, self.data.fingerprint, _warn)
        if state is None and source is not None:
            state = start(self.run, Path(source), self.data.fingerprint, _warn)
            _say(self.rank, f"started from {source} after {state.step} of {recipe.steps} steps")
        if state is not None:
            self.meter.forget()
        return state or TrainState()

    def _at(self, position: int) -> list[Batch]:
        size = self.job.plan.strategy[MICRO_BATCH_SIZE]
        return self._placed(self.data.micro_batches(position, self.run.data_rank, self.run.data_degree, size))

    def _placed(self, batches: list[Batch]) -> list[Batch]:
        return [{k: to_device(v, self.run.device) for k, v in batch.items()} for batch in batches]

    def _due(self, index: int, every: int | None) -> bool:
        """Whether something that happens every so many steps (None: at the end) follows step ``index``."""
        done = index + 1
        return done == self.job.recipe.steps or (every is not None and done % every == 0)

    def _pauses(self, index: int) -> bool:
        """Whether anything happens between step ``index`` and the next."""
        recipe = self.job.recipe
        due = self._due(index, recipe.evaluation.every) or self._due(index, recipe.checkpoint.every)
        return due or self.recovery.due(index) or self.save_owed

    def _measure(self, done: int) -> None:
        """The peak is taken over the first steps, or over all of them with exact memory."""
        if done < EXACT_STEPS or self.job.exact_memory:
            self.meter.sample()
        if done == EXACT_STEPS - 1 and not self.job.exact_memory:
            return_large_frees(False)

    def _finish(self, pending: _Pending | None, held_out: float | None = None) -> bool:
        """Read a step's results, record, show and judge them. Returns whether some rank is to stop.

        Raises Rewound or NumericsError.
        """
        if pending is None:
            return False
        result, number, seconds = pending.result, pending.index + 1, pending.seconds
        loss, norm, tokens = float(result.loss), float(result.grad_norm), int(result.tokens)
        skipped = bool(result.skipped)
        if self.survival.alarm.spoils(pending.part):
            raise _Spoiled
        rewinds = self.state.rewinds
        self.state = replace(self.state, step=number, tokens=self.state.tokens + tokens)
        if self.rank == 0:
            rate, speed = pending.learning_rate, tokens / seconds
            done = StepMetrics(
                number, loss, norm, rate, tokens, seconds, speed, skipped, held_out, rewinds or None
            )
            self.metrics.write(done)
            self.progress.show(done, self.meter.peak.allocated)
        seen = Observed(pending.index, loss, norm, skipped, float(result.loss_scale))
        self.state = self.recovery.see(self.state, seen)
        return bool(pending.stop)

    def _pause(self, pending: _Pending, stop: bool) -> None:
        """Between two steps: evaluate, save, and stop if asked to. None of it counts as step time."""
        index, recipe = pending.index, self.job.recipe
        float(pending.result.loss)
        pending.seconds += self._lap()
        held_out = None
        if self._due(index, recipe.evaluation.every) and self.data.held_out_sequences and not stop:
            size = self.job.plan.strategy[MICRO_BATCH_SIZE]
            self.survival.alarm.enter()
            batches = self.data.held_out(0, self.run.data_rank, self.run.data_degree, size)
            held_out = self.held_out = evaluate(self.run, self._placed(batches))
        stop = self._finish(pending, held_out) or stop
        self.pending = None
        if self._saves(index, stop):
            save(self.run, self.state, self.checkpoints, recipe.checkpoint.keep, self.data.fingerprint)
            leave(self.run, self.job.folder)
        if stop and index + 1 < recipe.steps:
            again = "run the same command to go on"
            _say(self.rank, f"stopped on request: saved step {index + 1}; {again}")
            raise Preempted("stopped on request", where=f"step {index + 1}", why="saved", fix=again)
        if self.recovery.due(index):
            self.recovery.snapshot(self.state)
        self.meter.forget()
        self._lap()

    def _saves(self, index: int, stop: bool) -> bool:
        """Whether to save after step ``index``. What is due waits until the guard suspects nothing."""
        due = self.save_owed or self._due(index, self.job.recipe.checkpoint.every)
        may_wait = self.state.guard.burst is not None and index + 1 < self.job.recipe.steps
        self.save_owed = due and may_wait and not stop
        return stop or (due and not self.save_owed)

    def _lap(self) -> float:
        """Seconds since the last call: of a step when called as soon as it has been issued."""
        before, self.clock = self.clock, time.perf_counter()
        return self.clock - before

    def _report(self) -> None:
        """Predicted beside measured, for every rank."""
        peaks: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(peaks, (self.meter.peak.allocated, self.meter.peak.reserved))
        passes = self.stopwatch.collect(self.run)
        if self.rank != 0:
            return
        self.progress.close()
        self.metrics.close()
        self.recovery.close()
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
            "passes": passes,
        }
        write_whole(self.job.folder / REPORT, json.dumps(report, indent=1).encode())


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def _warn(line: str) -> None:
    """Rank 0's standard output reaches the user; its standard error is a log."""
    print(f"warning: {line}", flush=True)


def seed_step(seed: int, index: int, rank: int) -> None:
    """Seed dropout and the like from (seed, step, rank): nothing of the generator needs to be saved."""
    torch.manual_seed(((seed * 1_000_003 + index) * 65_537 + rank) % 2**63)


def _require_vocabulary(blueprint: Blueprint, data: Data) -> None:
    """Raise RecipeError when the data has token ids that the model does not know."""
    if blueprint.vocab is not None and data.vocab is not None and data.vocab > blueprint.vocab:
        raise RecipeError(
            f"the model's vocabulary of {blueprint.vocab:,} is too small",
            where="model.vocab",
            why=f"the tokenizer has {data.vocab:,} tokens",
            fix=f"set model.vocab to at least {data.vocab}",
        )
