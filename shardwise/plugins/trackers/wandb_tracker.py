"""Weights & Biases. Offline unless WANDB_MODE or WANDB_API_KEY is set: ``wandb sync`` uploads the folder later."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.plugins.trackers.base import first_name, name_of, project
from shardwise.trainer.tracking import RunTracker


class WandbTracker(RunTracker):
    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "online" if "WANDB_API_KEY" in os.environ else "offline")
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", project()),
            name=name_of(run),
            id=first_name(folder, run, secrets.token_hex(6)),
            resume="allow",
            dir=str(folder),
            config=dict(run["recipe"]),
            mode=mode,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")  # a rewind goes back, which wandb's own step cannot

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def mark(self, step: int, name: str, text: str) -> None:
        self._run.log({f"event/{name}": 1, "event": f"{name}: {text}", "step": step})

    def close(self, reason: str) -> None:
        self._run.summary["ended"] = reason
        self._run.finish(exit_code=0 if reason in ("finished", "stopped") else 1)


def open_tracker() -> type[RunTracker]:
    import wandb  # noqa: F401 (raises where the library is missing)

    return WandbTracker
