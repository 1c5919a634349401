"""What a run writes while it trains: ``metrics.jsonl``, the progress line, and ``report.json`` at its end."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from shardwise.checkpoint.run_folder import forget_report, write_outcome
from shardwise.core.attempts import Attempts
from shardwise.core.plan import Plan
from shardwise.core.run_files import (
    ExpertsRecord,
    GradientHistogram,
    Outcome,
    PassesRecord,
    PhasesRecord,
    RankMemory,
    StepRecord,
)
from shardwise.core.units import format_count, format_percent
from shardwise.engine.train_state import TrainState
from shardwise.hardware.other_work import OtherWork
from shardwise.runtime.compiled import new_warnings, seconds_compiling
from shardwise.trainer.meter import EXACT_STEPS, Measured
from shardwise.trainer.metrics import MetricsFile, typical_seconds
from shardwise.trainer.progress import Progressing


class RunLog:
    """The log of one run. Only rank 0 writes, so it calls ``begin``, ``step`` and ``end`` like all ranks.

    Args:
        resumed: steps that were done before.
    """

    def __init__(self, folder: Path, plan: Plan, steps: int, resumed: int) -> None:
        self._folder = folder
        self._plan = plan
        self._resumed = resumed
        self._writes = dist.get_rank() == 0
        self._started = time.perf_counter()
        self._other_work = OtherWork()
        self._lap_began = (self._started, seconds_compiling())
        # The newest evaluation, of an earlier process too: the report has it even if this one evaluates nothing.
        self.validation_loss: float | None = None
        self._set_losses: Mapping[str, float] = {}
        self._values: Mapping[str, float] = {}
        self._trained: int | None = None
        if self._writes:
            self._metrics = MetricsFile(folder / "metrics.jsonl", resumed, warn)
            losses = [record.held_out_loss for record in self._metrics.before]
            self.validation_loss = next((loss for loss in reversed(losses) if loss is not None), None)
            named = (record.held_out_losses for record in reversed(self._metrics.before))
            self._set_losses = next(filter(None, named), {})
            values = (record.metrics for record in reversed(self._metrics.before))
            self._values = next(filter(None, values), {})
            self._progress = Progressing(steps, resumed, units=plan.step.units)

    def begin(self, trained: int) -> None:
        """Training of ``trained`` parameters begins: delete the report of an earlier training."""
        self._trained = trained
        if self._writes:
            forget_report(self._folder)
            Attempts(self._folder).training(self._resumed)

    def lap(self) -> tuple[float, float]:
        """Seconds since the last call, without those of compiling kernels, and of compiling."""
        began, compiling_before = self._lap_began
        now = time.perf_counter()
        compiling_until_now = seconds_compiling()
        self._lap_began = (now, compiling_until_now)
        compiling = compiling_until_now - compiling_before
        return now - began - compiling, compiling

    def step(self, record: StepRecord) -> None:
        """Log a step."""
        for warning in new_warnings():
            warn(warning)
        if record.held_out_loss is not None:
            self.validation_loss = record.held_out_loss
        self._set_losses = record.held_out_losses or self._set_losses
        self._values = record.metrics or self._values
        if self._writes:
            self._metrics.write(record)
            self._progress.show(record)

    def close(self) -> None:
        """Nothing more is shown. The terminal gets its cursor back, also after a failure."""
        if self._writes:
            self._progress.close()

    def sync(self) -> None:
        """A checkpoint will be saved: write the steps before it to the disk."""
        if self._writes:
            self._metrics.sync()

    def end(
        self,
        peak: Measured,
        state: TrainState,
        passes: PassesRecord | None,
        phases: PhasesRecord | None = None,
        gradients: GradientHistogram | None = None,
        experts: ExpertsRecord | None = None,
    ) -> None:
        """Write ``report.json``. All ranks call it together.

        Args:
            peak: of this rank; 0 if it made no step, because an earlier process made all of them.
            state: at the end.
            passes: the timed passes of ranks that hold different blocks.
            phases: the timed phases of a step.
            gradients: their sizes in a step.
            experts: their load.
        """
        here = socket.gethostname()
        own = (peak, here, self._other_work.own_seconds())
        ranks = [own] * dist.get_world_size()
        dist.all_gather_object(ranks, own)  # collective, so before the other ranks return
        if not self._writes:
            return
        self.close()
        self._metrics.close()
        plan = self._plan
        # This process has made no step if an earlier one was killed after the last step.
        seconds = self._metrics.seconds or [record.seconds for record in self._metrics.before]
        outcome = Outcome(
            ranks=tuple(
                RankMemory(rank, plan.predicted_allocated(rank), measured.allocated, measured.reserved)
                for rank, (measured, _, _) in enumerate(ranks)
            ),
            predicted_step_seconds=plan.step.seconds,
            measured_step_seconds=typical_seconds(seconds, EXACT_STEPS) if seconds else None,
            ledger=plan.ledger,
            held_out_loss=self.validation_loss,
            parameters=plan.parameters,
            trained_parameters=self._trained,
            tokens=state.tokens,
            seconds=time.perf_counter() - self._started,
            device=plan.device,
            world_size=plan.world_size,
            passes=passes,
            phases=phases,
            held_out_losses=self._set_losses,
            gradients=gradients,
            metrics=self._values,
            best_step=None if state.best is None else state.best.step,
            experts=experts,
            # Other ranks on this host are no other work.
            other_cores=self._other_work.cores(sum(spent for _, host, spent in ranks if host == here)),
        )
        write_outcome(self._folder, outcome)


def trained_sentence(trained: int, frozen: int) -> str:
    """How many of the parameters are trained."""
    whole = trained + frozen
    share = format_percent(trained / whole, 2)
    return f"training {format_count(trained)} of {format_count(whole)} parameters ({share})"


def say(text: str) -> None:
    """Print a line on rank 0, whose standard output reaches the user."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def warn(text: str) -> None:
    say(f"warning: {text}")
