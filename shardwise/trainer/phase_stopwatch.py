"""Times the phases of steps on every rank, to compare their medians with the plan's, as the median step is.

The first step that is timed is the second one after the steps whose memory is measured. The one before it takes longer
on the CPU: the heap, which returned its memory in those steps, grows again. On the CPU, where collectives block, the
next steps give the seconds of communication: a clock around every operation slows them by some milliseconds, so their
phases are not counted. On accelerators communication is part of the phase in which it is not hidden.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardwise.core.run_files import PhasesRecord
from shardwise.engine.phase import current_phase
from shardwise.engine.run import Run
from shardwise.engine.step_clock import OperationClock, PhaseClock, communicates
from shardwise.hardware.kinds import kind_of
from shardwise.trainer.meter import EXACT_STEPS

BEFORE = EXACT_STEPS + 1
"""Steps before the first one that is timed."""

_COMMUNICATION = 3
"""Most steps in which communication is timed."""
_ENOUGH = 3
"""Steps that must follow, so that the run's typical seconds are those of undisturbed steps."""
_STEPS_KEPT = 1000
"""Steps whose phases are kept: the newest ones."""


class PhaseStopwatch:
    """Times phases in the steps of a run, and communication in a few. The run starts, or resumes, after ``first``."""

    def __init__(self, run: Run, first: int) -> None:
        self._device = run.device
        self._first = first + BEFORE
        blocks = kind_of(run.device).is_host and run.context.layout.world_size > 1
        left = run.recipe.steps - self._first - 1 - _ENOUGH
        count = max(0, min(_COMMUNICATION, left)) if blocks else 0
        self._sending = range(self._first + 1, self._first + 1 + count)
        self._running: deque[PhaseClock] = deque()
        self._spent: deque[Mapping[str, float]] = deque(maxlen=_STEPS_KEPT)
        self._sent: list[dict[str, float]] = []
        self._steps = 0

    @contextmanager
    def over(self, index: int) -> Iterator[None]:
        """Enclose the step ``index``, counted from 0."""
        if index in self._sending:
            self._sent.append({})
            with OperationClock(self._record, communicates):
                yield
        elif index >= self._first:
            if len(self._running) > 1:  # the loop has read the results of the step before the last: no wait
                self._read()
            clock = PhaseClock(self._device)
            with clock.over():
                yield
            self._running.append(clock)
        else:
            yield

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        sent = self._sent[-1]
        sent[current_phase()] = sent.get(current_phase(), 0.0) + seconds

    def _read(self) -> None:
        self._spent.append(self._running.popleft().read())
        self._steps += 1

    def collect(self) -> PhasesRecord | None:
        """Median seconds by phase, with communication apart where it was timed; None if the run was too short.

        Collective.
        """
        while self._running:
            self._read()
        if not self._steps:
            return None
        mine = self._seconds()
        every: list[Any] = [mine] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        return PhasesRecord(self._first + 1, every[0], tuple(every), self._steps)

    def _seconds(self) -> dict[str, float]:
        spent, sent = _medians(self._spent), _medians(self._sent)
        for phase, waited in sent.items():
            spent[phase] = max(0.0, spent.get(phase, 0.0) - waited)
        sampling = [step["rollout"] for step in self._spent if "rollout" in step]
        # Steps that train on the same rollout share its seconds, as in the plan.
        rollout = {"rollout": sum(sampling) / len(self._spent)} if sampling else {}
        spent.pop("rollout", None)
        seconds = {
            **rollout,
            "forward": spent.pop("forward", 0.0),
            "backward": spent.pop("backward", 0.0),
            "optimizer": sum(spent.values()),
        }
        if sent:
            seconds["communication"] = sum(sent.values())
        return seconds


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each phase over steps; one that a step lacks took no time in it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
