"""A step whose results are on their way to the host, and what happens if they say that it must be run again.

The results are copied when the step has been issued, and read when the next one has been. ``item`` would queue a copy
behind the next step and wait for that step, too: the device would idle while the host logs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.run import Run
from shardwise.engine.step import StepResult
from shardwise.engine.train_state import TrainState
from shardwise.hardware.kinds import kind_of
from shardwise.runtime.offload.host import host_copy
from shardwise.trainer.run_log import say


@dataclass
class IssuedStep:
    """A step that the host has issued and whose results it has not read.

    ``index`` counts steps from 0. ``result`` and ``flags`` are in host memory, valid after ``wait``. ``seconds`` are
    those of the step without ``compiling`` kernels.
    """

    index: int
    result: StepResult
    flags: Tensor
    seconds: float
    compiling: float
    _copied: torch.Event | None

    @classmethod
    def of(
        cls, index: int, result: StepResult, flags: Tensor, seconds: float, compiling: float
    ) -> IssuedStep:
        """Start to copy what a step yielded to the host."""
        device = result.loss.device
        copies: dict[str, Any] = {
            name: None if value is None else host_copy(value) for name, value in vars(result).items()
        }
        copied = None if kind_of(device).is_host else torch.accelerator.current_stream(device).record_event()
        return cls(index, replace(result, **copies), host_copy(flags), seconds, compiling, copied)

    def wait(self) -> None:
        """Wait for this step, not for those that were issued since."""
        if self._copied is not None:
            self._copied.synchronize()


class RunAgain(Exception):
    """The step whose results are read next is void: it and all after it are run again."""


def require_capacity(run: Run, issued: IssuedStep) -> None:
    """Raise RunAgain if the step needed more room than there was."""
    if done := run.enlarged(issued.result.capacity_used):
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
