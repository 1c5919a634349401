"""TensorBoard: scalars by name, events as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.plugins.trackers.base import flat
from shardwise.trainer.tracking import RunTracker


class TensorboardTracker(RunTracker):
    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = run["step"] + 1 if run["step"] else None
        self._writer = SummaryWriter(str(folder), purge_step=resumed)
        recipe = "\n".join(f"    {name}: {value}" for name, value in flat(run["recipe"]))
        self._writer.add_text("recipe", recipe, run["step"])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def mark(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(f"event/{name}", text, step)
        self._writer.add_scalar(f"event/{name}", 1.0, step)

    def close(self, reason: str) -> None:
        self._writer.close()


def open_tracker() -> type[RunTracker]:
    import torch.utils.tensorboard  # noqa: F401 (raises where the library is missing)

    return TensorboardTracker
