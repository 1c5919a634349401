"""Trackio: its own local database (TRACKIO_DIR); ``trackio show`` opens it. A resumed run goes on under its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.plugins.trackers.base import first_name, flat, name_of, project, remember
from shardwise.trainer.tracking import RunTracker


class TrackioTracker(RunTracker):
    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", project()),
            name=first_name(folder, run, name_of(run)),
            config=dict(flat(run["recipe"])),
            # All folders have one database, also those of equal names.
            resume="allow" if run["step"] else "never",
            embed=False,
        )
        remember(folder, self._run.name)  # Trackio gives another name where one is taken

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def mark(self, step: int, name: str, text: str) -> None:
        self._run.log({f"event/{name}": 1, "event": f"{name}: {text}"}, step=step)

    def close(self, reason: str) -> None:
        self._run.finish()


def open_tracker() -> type[RunTracker]:
    import trackio  # noqa: F401 (raises where the library is missing)

    return TrackioTracker
