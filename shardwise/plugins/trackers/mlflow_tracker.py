"""MLflow: a file store in the run's folder, or the server of MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.plugins.trackers.base import flat, name_of, project
from shardwise.trainer.tracking import RunTracker

_LONGEST_VALUE = 500
"""Characters of a parameter's value or of a tag that every store takes."""
_MOST_PARAMETERS = 100
"""Parameters in a request."""


class MlflowTracker(RunTracker):
    """A client of its own: MLflow's active run belongs to a thread, and to the user's code."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder.mkdir(parents=True, exist_ok=True)
        # Newer MLflow refuses a file store without this; a database needs packages that mlflow-skinny leaves out.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        own = (folder / "mlruns").resolve().as_uri()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", own))
        remembered = folder / "run_id"
        if remembered.exists() and run["step"]:
            self._id = remembered.read_text(encoding="utf-8")
            self._client.update_run(self._id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", project())
        record = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if record is None else record.experiment_id
        self._id = self._client.create_run(experiment, run_name=name_of(run)).info.run_id
        remembered.write_text(self._id, encoding="utf-8")
        params = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in flat(run["recipe"])]
        for first in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMETERS])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def mark(self, step: int, name: str, text: str) -> None:
        key = name.replace(" ", "_")
        self._client.log_metric(self._id, f"event/{key}", 1.0, step=step)
        self._client.set_tag(self._id, f"event.{step}.{key}", text[:_LONGEST_VALUE])

    def close(self, reason: str) -> None:
        status = {"finished": "FINISHED", "stopped": "FINISHED", "preempted": "KILLED"}.get(reason, "FAILED")
        self._client.set_terminated(self._id, status)


def open_tracker() -> type[RunTracker]:
    import mlflow  # noqa: F401 (raises where the library is missing)

    return MlflowTracker
