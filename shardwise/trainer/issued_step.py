"""A step whose results are still on the device, and what happens if they say that it must be run again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shardwise.engine.run import Run
from shardwise.engine.step import StepResult, enlarged
from shardwise.engine.train_state import TrainState
from shardwise.trainer.run_log import say


@dataclass
class IssuedStep:
    """A step that the host has issued and whose results it has not read.

    ``index`` counts steps from 0. ``seconds`` are those of the step without ``compiling`` kernels.
    """

    index: int
    result: StepResult
    flags: Tensor
    seconds: float
    compiling: float


class RunAgain(Exception):
    """The step whose results are read next is void: it and all after it are run again."""


def require_capacity(run: Run, issued: IssuedStep) -> None:
    """Raise RunAgain if the step needed more room than there was."""
    if done := enlarged(run, issued.result.capacity_used):
        say(f"step {issued.index + 1}: {done}")
        raise RunAgain


def noted_capacity(run: Run, state: TrainState) -> TrainState:
    """The state with the room that this run has learned to need."""
    capacity = run.options.capacity
    return state if capacity is None else replace(state, capacity=capacity.factor)


def restore_capacity(run: Run, state: TrainState) -> None:
    """Make the room that the run had learned to need before it was interrupted, perhaps in another layout."""
    if (capacity := run.options.capacity) is not None and state.capacity is not None:
        capacity.factor = max(capacity.factor, state.capacity)
