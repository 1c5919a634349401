"""The folder of a run: claimed by one process at a time, and what is written before training starts.

``recipe.yaml`` says how what was trained is read again (``generate`` and ``export`` take the tokenizer from it), so it
is replaced only by that of a run that is to train: what ``start.py`` refuses, or has nothing to do, never comes as far
as ``prepare``. What only ranks can tell (other content behind the same name, tensors of another dtype) is refused
afterwards. ``report.json``, what the folder's last training came to, goes when the ranks have accepted the run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from shardwise.core.errors import RecipeError, ResourceError
from shardwise.core.plan import Plan, plan_from
from shardwise.core.recipe import Recipe, dump_recipe, load_recipe
from shardwise.core.whole_file import write_whole
from shardwise.technique import SETTINGS

RECIPE, PLAN, REPORT, PAGE = "recipe.yaml", "plan.json", "report.json", "report.html"
LOCK, HOLDER = ".lock", ".holder"


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder while training in it.

    Raises:
        ResourceError: it cannot be made or written.
        RecipeError: another process trains in it.
    """
    try:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / HOLDER).touch()
            lock = FileLock(folder / LOCK)
            lock.acquire(timeout=0)
    except Timeout as error:
        raise RecipeError(
            "another process trains in this folder",
            where=str(folder),
            why=(folder / HOLDER).read_text(encoding="utf-8").strip(),
            fix="wait for it or give another --out",
        ) from error
    try:
        with _writing(folder):
            holder = f"process {os.getpid()} on {socket.gethostname()}\n"
            (folder / HOLDER).write_text(holder, encoding="utf-8")
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises ResourceError for what the system refuses, but a Timeout of the lock as it is."""
    try:
        yield
    except Timeout:
        raise
    except OSError as error:
        raise ResourceError(
            "cannot write the run's folder",
            where=str(folder),
            why=error.strerror or str(error),
            fix="give another --out",
        ) from error


def prepare(folder: Path, recipe: Recipe, plan: Plan) -> None:
    """Write the resolved recipe and the plan, which is all that workers read.

    Raises ResourceError; recipe and plan are then each as it was, or as it is to be.
    """
    with _writing(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_whole(folder / RECIPE, dump_recipe(recipe).encode())
    # The plan last: a waiting rank takes its presence as the signal to start.
    write_whole(folder / PLAN, plan.to_json().encode())


def correct(folder: Path, plan: Plan) -> None:
    """Put ``plan`` in the place of the folder's, and its predictions into the report of the run, which has ended."""
    write_whole(folder / PLAN, plan.to_json().encode())
    if not (folder / REPORT).exists():
        return  # the run had no step left to make
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    for rank in report["ranks"]:
        rank["predicted_peak_bytes"] = plan.predicted_allocated(rank["rank"])
    report["predicted_step_seconds"] = plan.step.seconds
    report["ledger"] = plan.peak.ledger.as_dict()
    write_whole(folder / REPORT, json.dumps(report, indent=1).encode())


def forget_report(folder: Path) -> None:
    """Training begins: what the last one came to would be taken for what this one comes to."""
    (folder / REPORT).unlink(missing_ok=True)


def read_job(folder: Path) -> tuple[Recipe, Plan]:
    """The resolved recipe and the plan of a run folder."""
    recipe = load_recipe(folder / RECIPE, [], SETTINGS)
    return recipe, plan_from(json.loads((folder / PLAN).read_text(encoding="utf-8")))


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder; it stays where what was to be done in it fails, because its logs say why."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except BaseException:
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        raise
    shutil.rmtree(folder, ignore_errors=True)
