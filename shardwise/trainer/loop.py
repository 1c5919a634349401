"""The training loop: build, restore, then step until done. It names no technique.

A step's results are read one step late, so the device never waits for the host to print. The guard (recovery.py)
judges them; it may raise to rewind the run, and the loop continues from the restored state. After an OOM this rank
stops, and the launcher starts all ranks again with half the micro-batch (oom_restart.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.adapter import leave
from shardwise.checkpoint.checkpoint import on_rank_0, restore_or_start
from shardwise.checkpoint.resume_checks import left_to_write
from shardwise.checkpoint.run_folder import ADAPTER, CHECKPOINTS, REPORT
from shardwise.checkpoint.saver import Saver
from shardwise.core import heartbeat
from shardwise.core.errors import Preempted, RecipeError
from shardwise.core.json_file import plain
from shardwise.core.plan import Plan
from shardwise.core.run_files import GradientNoise, StepRecord
from shardwise.data import Data, open_data
from shardwise.engine.build import build
from shardwise.engine.phase import listening
from shardwise.engine.run import BatchSource
from shardwise.engine.schedule import learning_rate
from shardwise.engine.seeding import seed_step
from shardwise.engine.step import loads, named_measures, step
from shardwise.engine.train_state import TrainState
from shardwise.launch.alarm import watch
from shardwise.launch.signals import StopRequest
from shardwise.model.blueprint import Blueprint
from shardwise.model.open import blueprint_of
from shardwise.recipe.sections import Recipe
from shardwise.runtime.kernel_check import after_each_check, newly_replaced
from shardwise.trainer.batches import StepBatches, batches_of, require_one_data, require_vocabulary
from shardwise.trainer.evaluation import best_of, evaluate
from shardwise.trainer.expert_watch import ExpertWatch
from shardwise.trainer.faults.oom_restart import followed_oom, stop_on_oom
from shardwise.trainer.faults.recovery import ObservedStep, Recovery, Rewound
from shardwise.trainer.gradient_histogram import GradientWatch
from shardwise.trainer.hooks import ASKS, EVALUATE, PREEMPT, SAVE, SKIP, STOP, Hooks, open_callbacks, raised
from shardwise.trainer.issued_step import (
    IssuedStep,
    RunAgain,
    StepFlags,
    noted_capacity,
    require_capacity,
    restore_capacity,
)
from shardwise.trainer.meter import MemoryMeter
from shardwise.trainer.noise import gradient_noise
from shardwise.trainer.pass_stopwatch import Stopwatch
from shardwise.trainer.pauses import Pauses
from shardwise.trainer.phase_stopwatch import PhaseStopwatch
from shardwise.trainer.precomputed import with_precomputed
from shardwise.trainer.predictions import Predictions
from shardwise.trainer.profiling import Profiling
from shardwise.trainer.run_log import RunLog, say, trained_sentence, warn
from shardwise.trainer.tracking import Tracking
from shardwise.trainer.warm_up import warm_kernels


@dataclass
class Job:
    """One training job, as one rank sees it."""

    recipe: Recipe
    plan: Plan
    folder: Path
    device: torch.device
    exact_memory: bool = False


class Trainer:
    """Trains one job to its end, on one rank. All ranks run the same steps together.

    Attributes:
        state: progress of the run, up to the last step whose results were read.
        index: the step that runs, from 0.
    """

    def __init__(self, job: Job) -> None:
        recipe = job.recipe
        strategy = job.plan.strategy
        self.job = job
        self.stopping = StopRequest(job.device)
        self.blueprint: Blueprint = blueprint_of(recipe)
        self.data: Data = open_data(recipe, self.blueprint.dataset)
        require_vocabulary(self.blueprint, self.data)
        require_one_data(self.data)
        callbacks = open_callbacks(recipe.callbacks)
        named = recipe.trackers if dist.get_rank() == 0 else ()
        tracking = Tracking(named, job.folder, warn) if named else None
        library = recipe.optimizer if recipe.optimizer.factory else None
        convolves = self.blueprint.objective is None  # a user's own module may have any layers
        warm_kernels(job.device, strategy, library, convolves=convolves, objective=self.blueprint.minimises)
        # This imports the model's code before the level of memory is taken.
        self._trained, self._frozen = self.blueprint.parameter_counts()
        self.meter = MemoryMeter(job.device, job.exact_memory)  # from here on memory counts
        after_each_check(self.meter.forget)
        self.run = build(recipe, self.blueprint, strategy, job.device)
        with_precomputed(self.run, self.data, say)
        self.state = self._restored()
        self.index = self.state.step
        self.batches = batches_of(self.data, self.run)
        self.predictions = Predictions(self.run) if recipe.evaluation.metrics is not None else None
        self.saver = Saver(self.run, job.folder, self.data.fingerprint)
        self.hooks = Hooks(callbacks, dist.get_rank(), [] if tracking is None else [("trackers", tracking)])
        heard = (lambda event: self.hooks.call("on_event", event)) if self.hooks.listening else None
        self.recovery = Recovery(self.run, self.data, job.folder, self.batches, self.saver.wait, warn, heard)
        self.pauses = Pauses(recipe)
        self.stopwatch = Stopwatch(self.run, self.state.step)
        self.phases = PhaseStopwatch(self.run, self.state.step)
        self.gradients = GradientWatch(self.run, self.state.step)
        self.experts = ExpertWatch(self.run)
        self.profiling = Profiling(recipe.profile, job.folder, job.device, warn)
        self.log = RunLog(job.folder, job.plan, recipe.steps, self.state.step)
        self._pending: IssuedStep | None = None
        self._watched = self._ended = False
        self._flags = StepFlags(self.hooks.may_ask and self.run.synchronous)
        self._asked = frozenset[str]()

    @property
    def _checkpoints(self) -> Path:
        return self.job.folder / CHECKPOINTS

    def _restored(self) -> TrainState:
        """Load the newest checkpoint if there is one."""
        state = restore_or_start(self.run, self._checkpoints, self.data.fingerprint, say, warn)
        if state is None:
            return TrainState()
        self.data.begin_at(state.cursor)
        restore_capacity(self.run, state)
        self.meter.forget()
        return state

    def train(self) -> None:
        """Train all remaining steps and write the report.

        Raises:
            NumericsError: the guard gives up.
            Preempted: a rank was asked to stop, and the run is saved.
            OutOfMemory: this rank ran out of memory; ``oom.json`` is written.
        """
        job = self.job
        if self.state.step >= job.recipe.steps:
            self._end_again()
            return
        if self._frozen:
            say(trained_sentence(self._trained, self._frozen))
        self.log.begin(self._trained)
        self.recovery.begin(self.state, followed_oom(job.folder, job.plan))
        with closing(self.log), listening(lambda phase: heartbeat.mark()), self._telling():
            self._rehearse()
            stop_on_oom(
                self._train, job.folder, job.plan, lambda: (self.index + 1, self.meter.reached().allocated)
            )
            self.saver.wait()
        self.recovery.close()
        if job.recipe.checkpoint.best is not None and self.state.best is None:
            warn(f"no best checkpoint: {job.recipe.checkpoint.best} was finite in no evaluation")
        timed = self.stopwatch.collect(), self.phases.collect()  # collective, as is the end of the log
        self.log.end(self.meter.peak, self.state, *timed, self.gradients.collect(), self.experts.collect())

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the callbacks of the start and of the end of the block."""
        job = self.job
        about = {"folder": str(job.folder), "recipe": job.recipe.model_dump(mode="json")}
        where = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        plan = job.plan.as_dict() if self.hooks.listening else {}
        progress = {"step": self.state.step, "steps": job.recipe.steps}
        self.hooks.call("on_start", {**about, **where, "plan": plan, **progress})
        try:
            yield
        except BaseException as error:
            reason = "preempted" if isinstance(error, Preempted) else "failed"
            with suppress(RecipeError):  # the first error is the one to report
                self._tell_end(reason, str(error))
            raise
        self._tell_end("stopped" if self._ended else "finished")

    def _tell_end(self, reason: str, error: str = "") -> None:
        end = {"step": self.state.step, "tokens": self.state.tokens, "reason": reason, "error": error}
        self.hooks.call("on_end", end)

    def _rehearse(self) -> None:
        """Evaluate one micro-batch of a user's own model before the first step; all of them for its metrics.

        The dry run runs the loss in training mode only, so a fault in evaluation would be found after the last step.
        """
        if self.blueprint.objective is None and self.state.step == 0:
            batches = self.batches.validation()
            if not batches and (self.predictions or self.job.recipe.checkpoint.best == "held_out_loss"):
                why = "the dataset has too few items, or data.held_out is 0"
                raise RecipeError("there is nothing to evaluate", where="data.held_out", why=why)
            losses = {"": evaluate(self.run, batches if self.predictions else batches[:1], self.predictions)}
            best_of(self.job.recipe, None, 0, self._by_name(losses, self._metrics()) if batches else {})
            self.meter.forget()

    def _metrics(self) -> dict[str, float]:
        """Of the evaluation of the run's own held-out data before."""
        of_objective = named_measures(self.run, self.run.passes.measures)
        return of_objective if self.predictions is None else {**of_objective, **self.predictions.values()}

    @staticmethod
    def _by_name(losses: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Every value of an evaluation; the loss of the run's own held-out data is ``held_out_loss``."""
        return {**{name or "held_out_loss": loss for name, loss in losses.items()}, **metrics}

    def _end_again(self) -> None:
        """All steps are done: write what an earlier process was killed before it wrote."""
        job = self.job
        checkpoint = self._checkpoints / f"step-{self.state.step}"
        left = on_rank_0(lambda: left_to_write(job.recipe, job.folder, checkpoint))
        writing = f"; writing {' and '.join(left)}" if left else ""
        say(f"{self.state.step} of {job.recipe.steps} steps are done{writing}")
        if ADAPTER in left:
            leave(self.run, job.folder, checkpoint)
        if REPORT in left:
            self.log.end(self.meter.peak, self.state, None)

    def _train(self) -> None:
        """Step to the end of the run; after a rewind, again from the restored state."""
        while self.state.step < self.job.recipe.steps and not self._ended:
            try:
                self._steps()
            except Rewound as rewound:
                self._asked |= self._flags.taken(self.state.step - 1)
                self.run.update.void = None  # a void step whose results were not read does not run again
                self.state = replace(rewound.state, capacity=self.state.capacity)
                self.pauses.rewind()
                self.batches.forget()
            except RunAgain:  # no step since then has updated anything
                self.state = noted_capacity(self.run, self.state)
            self._pending = None
            self.log.lap()

    def _steps(self) -> None:
        source = StepBatches(self.batches, lambda index: self.state.position(index), self.job.recipe.steps)
        self.run.passes.begin(source, self.state.step)
        for index in range(self.state.step, self.job.recipe.steps):
            before, self._pending = self._pending, self._issue(index, source)
            # Only now, when the device has the next step to do, does the host wait for results of the one before.
            asked = frozenset[str]() if before is None else self._finish(before)
            self.meter.after_step()
            self._asked |= asked - {SKIP}  # the next step has read that flag on the device
            if (index + 1) % self.batches.unit == 0 and (self._asked or self.pauses.after(index)):
                self._pause(self._pending, self._asked)
                self._asked = frozenset()
            if self._ended:
                return

    def _issue(self, index: int, source: BatchSource) -> IssuedStep:
        """Run a step without waiting for the device."""
        recipe, run = self.job.recipe, self.run
        seed_step(recipe.seed, index, run.random_rank)
        with self._monitored(index):
            rate, skip = learning_rate(recipe, index), self._flags.skip(index)
            result = step(run, source.micro_batches(index), rate, skip)
        return IssuedStep.of(index, result, self._flags.add(index, self._agreed(index)), *self.log.lap())

    @contextmanager
    def _monitored(self, index: int) -> Iterator[None]:
        """Tell the OOM record and the watchdog which step runs, and time it if it is the one to time."""
        self.index = index
        heartbeat.own.at_step(index + 1)
        with ExitStack() as stack:
            for recorder in (self.stopwatch, self.phases, self.gradients, self.profiling):
                stack.enter_context(recorder.over(index))
            yield

    def _agreed(self, index: int) -> Tensor:
        """What any rank was asked for, on all ranks, without waiting for the device: PREEMPT, then ASKS."""
        # Ranks that are not in the same step can agree only where the run pauses.
        if self.run.synchronous or self.pauses.after(index):
            return self.stopping.agreed(*self.hooks.asked())
        return torch.zeros(1 + len(ASKS))

    def _finish(
        self,
        pending: IssuedStep,
        losses: Mapping[str, float] = {},
        metrics: Mapping[str, float] = {},
        noise: GradientNoise | None = None,
    ) -> frozenset[str]:
        """Read, log and judge the results of a step. Returns the flags that are set.

        Args:
            losses: of the validation sets by name; "" is the run's own.
            metrics: of a user's module.

        Raises Rewound, RunAgain or NumericsError.
        """
        pending.wait()
        result = pending.result  # on the host: the calls below do not wait
        for sentence in newly_replaced():
            warn(sentence)
        require_capacity(self.run, pending)
        self.experts.see(result)
        loss, norm, scale = float(result.loss), float(result.grad_norm), float(result.loss_scale)
        tokens = int(result.tokens)
        skipped = bool(result.skipped)
        self.state = replace(self.state, step=pending.index + 1, tokens=self.state.tokens + tokens)
        record = StepRecord(
            step=self.state.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate(self.job.recipe, pending.index),
            tokens=tokens,
            seconds=pending.seconds,
            tokens_per_second=tokens / pending.seconds,
            processed_per_second=self.job.plan.step.tokens / pending.seconds,
            loss_scale=scale if self.run.loss_scale.active else None,
            peak_bytes=self.meter.peak.allocated,
            skipped=skipped,
            held_out_loss=losses.get(""),
            held_out_losses={name: loss for name, loss in losses.items() if name} or None,
            metrics=metrics or None,
            rewinds=self.state.rewinds or None,
            gradient_noise=noise,
            **loads(self.run, result),
            compile_seconds=pending.compiling or None,
        )
        self.log.step(record)
        if self.hooks.listening:
            self.hooks.step(plain(record))
        if losses:
            figures = {"held_out_loss": record.held_out_loss, "held_out_losses": record.held_out_losses or {}}
            self.hooks.call("on_evaluate", {"step": self.state.step, **figures, "metrics": dict(metrics)})
        faulty = skipped and not (math.isfinite(loss) and math.isfinite(norm))  # else a callback asked for it
        self.state = self.recovery.see(self.state, ObservedStep(pending.index, loss, norm, faulty, scale))
        if not self._watched:
            watch(self.job.recipe.watchdog)
            self._watched = True
        return raised(pending.flags)

    def _pause(self, pending: IssuedStep, asked: frozenset[str]) -> None:
        """Between two steps: evaluate, save, and stop if asked to. The time of a step does not include it."""
        index = pending.index
        losses, metrics = dict[str, float](), dict[str, float]()
        noise: GradientNoise | None = None
        pending.wait()
        require_capacity(self.run, pending)
        pending.seconds += self.log.lap()[0]
        asked |= raised(pending.flags)
        stop, last = PREEMPT in asked, STOP in asked
        evaluates = (self.pauses.evaluates(index) or last or EVALUATE in asked) and not stop
        if evaluates:
            for name in self.batches.validation_sets:
                predictions = None if name else self.predictions  # own metrics are of the run's own data
                losses[name] = evaluate(self.run, self.batches.validation(name), predictions)
                if not name:
                    metrics = self._metrics()
        if evaluates and self.job.recipe.evaluation.noise_scale:
            noise = gradient_noise(self.run, self.batches.at(self.state.position(index + 1)))
        self._finish(pending, losses, metrics, noise)
        self._pending = None  # read already: the loop must not finish it again
        suspicious = self.state.guard.burst is not None
        improved = False if suspicious else self._improved(self._by_name(losses, metrics))
        if self.pauses.saves(index, stop or last, suspicious) or SAVE in asked or improved:
            self._save()
        if last and not stop:
            say(f"a callback ended the run after step {index + 1}")
            self._ended = True
        if stop and index + 1 < self.job.recipe.steps:
            self.saver.wait()
            again = "run the same command to go on"
            say(f"stopped on request: saved step {index + 1}; {again}")
            raise Preempted("stopped on request", where=f"step {index + 1}", why="saved", fix=again)
        if self.pauses.snapshots(index):
            self.recovery.snapshot(self.state)
        self.meter.forget()
        self.log.lap()

    def _improved(self, values: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best so far by ``checkpoint.best``; notes it."""
        before, step = self.state.best, self.state.step
        if before is not None and before.step == step:  # from before a rewind; its checkpoint may be replaced
            before = None
        best = best_of(self.job.recipe, before, step, values)
        self.state = replace(self.state, best=best)
        return best != before

    def _save(self) -> None:
        self.log.sync()
        cursor = self.data.cursor(self.state.position(self.state.step))
        self.saver.save(replace(self.state, cursor=cursor))
        path = self._checkpoints / f"step-{self.state.step}"
        committed = not self.job.recipe.checkpoint.background
        self.hooks.call("on_save", {"step": self.state.step, "path": str(path), "committed": committed})
