"""The load of experts over a run, for the report: the mean of its steps, summed up on the device."""

from __future__ import annotations

from torch import Tensor

from shardwise.core.run_files import ExpertsRecord
from shardwise.engine.run import Run
from shardwise.engine.step import StepResult


class ExpertWatch:
    """Of the steps of this process."""

    def __init__(self, run: Run) -> None:
        self._names = () if run.options.expert_load is None else run.options.expert_load.names
        self._sum: Tensor | None = None
        self._steps = 0

    def see(self, result: StepResult) -> None:
        """Add a step that was not void."""
        if result.expert_load is not None:
            self._sum = result.expert_load + (0 if self._sum is None else self._sum)  # [layers, experts]
            self._steps += 1

    def collect(self) -> ExpertsRecord | None:
        if self._sum is None:
            return None
        mean: list[list[float]] = (self._sum / self._steps).tolist()
        rows = tuple(tuple(round(load, 4) for load in row) for row in mean)
        return ExpertsRecord(self._steps, self._names, rows)
