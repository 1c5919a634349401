"""Times the phases of one step on every rank, to compare them with the plan's.

The step is the second one after the steps whose memory is measured. The first one takes longer on the CPU: the heap,
which returned its memory in those steps, grows again. On the CPU, where collectives block, the step after
it gives the seconds of communication: a clock around every operation slows that step by some milliseconds. On
accelerators communication is part of the phase in which it is not hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardwise.core.run_files import PhasesRecord
from shardwise.engine.phase import current_phase
from shardwise.engine.run import Run
from shardwise.engine.step_clock import OperationClock, PhaseClock, communicates
from shardwise.train.meter import EXACT_STEPS

BEFORE = EXACT_STEPS + 1
"""Steps before the one that is timed."""

_ENOUGH = 3
"""Steps that must follow, so that the run's typical seconds are those of undisturbed steps."""


class PhaseStopwatch:
    """Times phases in one step of a run, and communication in the next. The run starts, or resumes, after ``first``."""

    def __init__(self, run: Run, first: int) -> None:
        self._device, self._index = run.device, first + BEFORE
        blocks = run.device.type == "cpu" and run.context.layout.world_size > 1
        self._sends = blocks and self._index + 1 + _ENOUGH < run.recipe.steps
        self._clock: PhaseClock | None = None
        self._sent: dict[str, float] = {}

    @contextmanager
    def over(self, index: int) -> Iterator[None]:
        """Enclose the step ``index``, counted from 0."""
        if index == self._index:
            self._clock = PhaseClock(self._device)
            with self._clock.over():
                yield
        elif index == self._index + 1 and self._sends and self._clock is not None:
            with OperationClock(self._record, communicates):
                yield
        else:
            yield

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        self._sent[current_phase()] = self._sent.get(current_phase(), 0.0) + seconds

    def collect(self) -> PhasesRecord | None:
        """Seconds by phase, with communication apart where it was timed; None if the run was too short. Collective."""
        if self._clock is None:
            return None
        mine = self._seconds(self._clock)
        every: list[Any] = [mine] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return PhasesRecord(self._index + 1, every[0], tuple(every))

    def _seconds(self, clock: PhaseClock) -> dict[str, float]:
        spent = clock.read()
        for phase, sent in self._sent.items():
            spent[phase] = max(0.0, spent.get(phase, 0.0) - sent)
        seconds = {
            "forward": spent.pop("forward", 0.0),
            "backward": spent.pop("backward", 0.0),
            "optimizer": sum(spent.values()),
        }
        if self._sent:
            seconds["communication"] = sum(self._sent.values())
        return seconds
