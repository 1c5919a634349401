"""What ``shardwise.train`` and ``shardwise.train_module`` return: the record of a run, with its weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from torch import nn

from shardwise.core.run_files import Which
from shardwise.exporter.module_weights import load_into
from shardwise.report.record import RunRecord
from shardwise.report.run import read_run


@dataclass(frozen=True, repr=False)
class TrainedRun(RunRecord):
    """The record of a run that was trained here."""

    def load_into(self, module: nn.Module, checkpoint: Which = "latest") -> int:
        """Write the trained weights and buffers into a module like the one that was trained (``shardwise.load_into``).

        Args:
            checkpoint: latest, or best with ``checkpoint.best``.

        Returns:
            The step of the checkpoint.
        """
        return load_into(module, self.folder, checkpoint)


def trained_run(folder: Path) -> TrainedRun:
    """Read the folder of a run. Raises DataError."""
    record = read_run(folder)
    return TrainedRun(**{field.name: getattr(record, field.name) for field in fields(record)})
