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
from shardwise.trainer.hooks import SKIP, raised
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
        # The copies are asynchronous, into pinned memory; ``wait`` tells when they are there.
        copies: dict[str, Any] = {
            name: host_copy(value) if isinstance(value, Tensor) else value
            for name, value in vars(result).items()
        }
        copied = None if kind_of(device).is_host else torch.accelerator.current_stream(device).record_event()
        return cls(index, replace(result, **copies), host_copy(flags), seconds, compiling, copied)

    def wait(self) -> None:
        """Wait for this step, not for those that were issued since."""
        if self._copied is not None:
            self._copied.synchronize()


class StepFlags:
    """What the ranks agreed on with the flags of the last steps; a step that is run again keeps those of its first run.

    Args:
        skips: whether anything can ask to leave an update out.
    """

    def __init__(self, skips: bool) -> None:
        self._skips = skips
        self._flags: dict[int, Tensor] = {}  # by index of the step

    def add(self, index: int, agreed: Tensor) -> Tensor:
        """The flags of a step that has been issued, with ``agreed`` of now."""
        # A void step is known after the next one was issued. Run again, it reads the flags of the step before it.
        self._flags = {n: flags for n, flags in self._flags.items() if n >= index - 2}
        before = self._flags.get(index)
        self._flags[index] = agreed if before is None else agreed.maximum(before)
        return self._flags[index]

    def skip(self, index: int) -> Tensor | None:
        """1 if the step before was asked to leave this update out, else 0; None if nothing can have asked."""
        before = self._flags.get(index - 1)
        return before[-1] if self._skips and before is not None else None  # the last of ASKS is SKIP

    def taken(self, first: int) -> frozenset[str]:
        """What callbacks asked for with the steps from ``first`` on, which the run does not go on from.

        Steps after them are others, so none of them is skipped. Waits for the device.
        """
        asked = [raised(flags) for n, flags in self._flags.items() if n >= first]
        self._flags = {}
        return frozenset[str]().union(*asked) - {SKIP}


class RunAgain(Exception):
    """The step whose results are read next is void: it and all after it are run again."""


def require_capacity(run: Run, issued: IssuedStep) -> None:
    """Raise RunAgain if the step needed more room than there was."""
    if done := run.enlarged(issued.result.capacity_used, issued.result.capacity):
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
