"""The folder of a run: claimed by one process at a time, and what is written before training starts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.plan import Plan, plan_from
from shardwise.core.recipe import Recipe, dump_recipe, load_recipe
from shardwise.technique import SETTINGS

RECIPE, PLAN, REPORT, LOCK, HOLDER = "recipe.yaml", "plan.json", "report.json", ".lock", ".holder"


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder while training in it.

    Raises:
        ResourceError: it cannot be made or written.
        RecipeError: another process trains in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HOLDER).touch()
    except OSError as error:
        raise ResourceError(
            "cannot write the run's folder",
            where=str(folder),
            why=error.strerror or str(error),
            fix="give another --out",
        ) from error
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RecipeError(
            "another process trains in this folder",
            where=str(folder),
            why=(folder / HOLDER).read_text(encoding="utf-8").strip(),
            fix="wait for it or give another --out",
        ) from error
    try:
        (folder / HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def prepare(folder: Path, recipe: Recipe, plan: Plan) -> None:
    """Write the resolved recipe and the plan, which is all that workers read."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(dump_recipe(recipe), encoding="utf-8")
    # The plan last and whole: a waiting rank takes its presence as the signal to start.
    partial = folder / f"{PLAN}.partial"
    partial.write_text(plan.to_json(), encoding="utf-8")
    partial.rename(folder / PLAN)


def correct(folder: Path, plan: Plan) -> None:
    """Put ``plan`` in the place of the folder's, and its predictions into the report of the run, which has ended."""
    prepare(folder, load_recipe(folder / RECIPE, [], SETTINGS), plan)
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    for rank in report["ranks"]:
        rank["predicted_peak_bytes"] = plan.predicted_allocated(rank["rank"])
    report["predicted_step_seconds"] = plan.step.seconds
    report["ledger"] = plan.peak.ledger.as_dict()
    (folder / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")


def read_job(folder: Path) -> tuple[Recipe, Plan]:
    """The resolved recipe and the plan of a run folder."""
    recipe = load_recipe(folder / RECIPE, [], SETTINGS)
    return recipe, plan_from(json.loads((folder / PLAN).read_text(encoding="utf-8")))
