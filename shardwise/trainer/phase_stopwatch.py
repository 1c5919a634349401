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
        # Only where collectives block does a clock around an operation tell the seconds of its communication.
        blocks = kind_of(run.device).is_host and run.context.layout.world_size > 1
        left = run.recipe.steps - self._first - 1 - _ENOUGH
        count = max(0, min(_COMMUNICATION, left)) if blocks else 0
        self._communication_steps = range(self._first + 1, self._first + 1 + count)
        self._running: deque[PhaseClock] = deque()  # of steps that the device may not have done yet
        self._phases: deque[Mapping[str, float]] = deque(maxlen=_STEPS_KEPT)  # seconds of each step
        self._communication: list[dict[str, float]] = []  # seconds of each step in communication, by phase
        self._steps = 0

    @contextmanager
    def over(self, index: int) -> Iterator[None]:
        """Enclose the step ``index``, counted from 0."""
        if index in self._communication_steps:
            self._communication.append({})
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
        by_phase = self._communication[-1]
        by_phase[current_phase()] = by_phase.get(current_phase(), 0.0) + seconds

    def _read(self) -> None:
        self._phases.append(self._running.popleft().read())
        self._steps += 1

    def collect(self) -> PhasesRecord | None:
        """Median seconds by phase, with communication apart where it was timed; None if the run was too short.

        Collective.
        """
        while self._running:
            self._read()
        if not self._steps:
            return None
        seconds = self._seconds()
        by_rank: list[Any] = [seconds] * dist.get_world_size()
        dist.all_gather_object(by_rank, seconds)
        return PhasesRecord(self._first + 1, by_rank[0], tuple(by_rank), self._steps)

    def _seconds(self) -> dict[str, float]:
        phases = _medians(self._phases)
        communication = _medians(self._communication)
        # They are of different steps, so a difference may be below 0.
        for phase, waited in communication.items():
            phases[phase] = max(0.0, phases.get(phase, 0.0) - waited)
        seconds: dict[str, float] = {}
        sampling = [step["rollout"] for step in self._phases if "rollout" in step]
        if sampling:
            # Steps that train on the same rollout share its seconds, as in the plan.
            seconds["rollout"] = sum(sampling) / len(self._phases)
        phases.pop("rollout", None)
        seconds["forward"] = phases.pop("forward", 0.0)
        seconds["backward"] = phases.pop("backward", 0.0)
        seconds["optimizer"] = sum(phases.values())  # with the clip, and the setup before the forward pass
        if communication:
            seconds["communication"] = sum(communication.values())
        return seconds


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each phase over steps; one that a step lacks took no time in it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
