"""The folder of a run: one process holds it at a time, and workers read their recipe and plan from it.

``generate`` and ``export`` take the tokenizer from ``recipe.yaml``, so only a run that will train replaces it. A run
that ``resume_checks.py`` refuses, or that is finished, does not reach ``write_job``. Checks that need the data or the
tensors follow in the workers. If they refuse the run, its former recipe and plan come back (``job_unless_refused``);
when they have accepted it, the report of the run before is deleted.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

from filelock import FileLock, Timeout

from shardwise.core.atomic_file import make_folder, write_whole
from shardwise.core.errors import RecipeError, ResourceError, ShardwiseError
from shardwise.core.json_file import read_json, text_of
from shardwise.core.paths import only_a_path, path_of
from shardwise.core.plan import Plan, read_plan, unusable
from shardwise.core.run_files import Outcome
from shardwise.recipe.load import dump_recipe, read_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import AXES, SETTINGS, broken_rules, layout_of

RECIPE, PLAN, REPORT, PAGE = "recipe.yaml", "plan.json", "report.json", "report.html"
ADAPTER, CHECKPOINTS = "adapter", "checkpoints"
SAVED_AS = "shardwise_checkpoint"
"""Key in the header of the adapter's file: the hash of the manifest of the checkpoint with the same weights."""
LOCK, HOLDER = ".lock", ".holder"


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the folder while training in it. A new one in which nothing was written is removed again.

    Raises:
        ResourceError: it cannot be made or written.
        RecipeError: another process trains in it, or its path is not UTF-8, which safetensors cannot open.
    """
    _require_utf8(folder)
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with _writing(folder):
            make_folder(folder)
            (folder / HOLDER).touch()
            lock = FileLock(folder / LOCK)
            lock.acquire(timeout=0)
    except Timeout as error:
        raise RecipeError(
            "another process trains in this folder",
            where=str(folder),
            why=holder(folder),
            fix="wait for it or give another --out",
        ) from error
    try:
        with _writing(folder):
            process = f"process {os.getpid()} on {socket.gethostname()}\n"
            (folder / HOLDER).write_text(process, encoding="utf-8")
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        if os.listdir(folder) == [LOCK]:
            _remove(folder, new_folders)
        lock.release()


def holder(folder: Path) -> str:
    """The process that trains in the folder, and its host; "" if it cannot be read."""
    try:
        return (folder / HOLDER).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _remove(folder: Path, new_folders: Sequence[Path]) -> None:
    """Remove the lock, and those folders that were created for the run and are empty. The lock is held."""
    with suppress(OSError):
        (folder / LOCK).unlink()
        for path in new_folders:
            path.rmdir()


def _require_utf8(folder: Path) -> None:
    try:
        str(folder.absolute()).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecipeError(
            "the path of the run's folder is not UTF-8",
            where=ascii(str(folder)),
            why="safetensors could not open its files",
            fix="give another --out",
        ) from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn OSError into ResourceError; a Timeout of the lock, which is an OSError too, passes."""
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


OWN_SAMPLES = "# The model's factory has a dataset of its own: data.source and data.tokenizer are not read.\n"
"""The head of a recipe whose section `data` would mislead."""


def write_job(folder: Path, recipe: Recipe, plan: Plan) -> None:
    """Write the resolved recipe and the plan, which is all that workers read. Keep the former ones until they accept.

    Raises:
        ResourceError: a file cannot be written. Former files, if any, are then back.
    """
    with _writing(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name in (RECIPE, PLAN):
        # Nothing is linked on a first start, nor where workers were killed before they accepted the last job: then the
        # older link is the accepted one. Without hard links in the file system nothing comes back.
        with suppress(OSError):
            os.link(folder / name, _former(folder, name))
    try:
        note = OWN_SAMPLES if plan.step.unit == "samples" else ""
        write_whole(folder / RECIPE, (note + dump_recipe(recipe)).encode())
        # The plan last, so that a folder with a plan has the recipe of that plan.
        write_whole(folder / PLAN, plan.to_json().encode())
    except ResourceError:
        _restore_former(folder)
        raise


@contextmanager
def job_unless_refused(folder: Path, writes: bool) -> Iterator[None]:
    """The block opens the run of the folder's job. After an error the rank that ``writes`` restores the former job."""
    try:
        yield
    except ShardwiseError:
        if writes:
            _restore_former(folder)
        raise
    for name in (RECIPE, PLAN) if writes else ():
        with suppress(OSError):
            _former(folder, name).unlink()


def _restore_former(folder: Path) -> None:
    for name in (RECIPE, PLAN):
        with suppress(OSError):
            _former(folder, name).replace(folder / name)
            _former(folder, name).unlink()  # replace() leaves it where both are links to the same file


def _former(folder: Path, name: str) -> Path:
    return folder / f".{name}.former"


def read_outcome(folder: Path) -> Outcome | None:
    """The run's report; None when the run has not ended or made no step. Raises DataError."""
    path = folder / REPORT
    return read_json(path, Outcome) if path.exists() else None


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the run's report. Raises ResourceError."""
    write_whole(folder / REPORT, text_of(outcome).encode())


def lacks_page(folder: Path) -> bool:
    """Whether the run's page is missing, or older than its report."""
    page, report = folder / PAGE, folder / REPORT
    try:
        return page.stat().st_mtime_ns < report.stat().st_mtime_ns
    except OSError:
        return not page.exists()


def forget_report(folder: Path) -> None:
    """Delete the report of the run before, when training begins."""
    (folder / REPORT).unlink(missing_ok=True)


def load_run_recipe(folder: Path) -> Recipe:
    """The recipe of a run. One that does not say how documents begin was written when nothing was put before them.

    Raises RecipeError.
    """
    recipe, document = read_recipe(folder / RECIPE, [], SETTINGS)
    said = document.values.get("data")
    if isinstance(said, dict) and "begin" not in said:
        return recipe.model_copy(update={"data": recipe.data.model_copy(update={"begin": "none"})})
    return recipe


def with_date(recipe: Recipe, folder: Path | None = None) -> Recipe:
    """The recipe with the date that chat templates write: its own, else that of the run in ``folder``, else today.

    So a run has the same tokens when it is resumed on another day, on a machine without its token cache.
    """
    if recipe.data.date is not None:
        return recipe
    day = None
    if folder is not None and (folder / RECIPE).exists():
        with suppress(RecipeError):  # a damaged one is refused where the run is resumed
            day = load_run_recipe(folder).data.date
    data = recipe.data.model_copy(update={"date": day or date.today().isoformat()})
    return recipe.model_copy(update={"data": data})


def require_base_in_place(folder: Path, recipe: Recipe) -> None:
    """Raise RecipeError if the base model of the run is neither where it was nor where the folder has moved."""
    base = recipe.model.hf
    if base is not None and only_a_path(base) and not path_of(base).exists():
        raise RecipeError(
            "the base model of this run is gone",
            where=f"model.hf: {base}",
            why=f"the run in {folder} was trained on the model at this path",
            fix=f"bring it back, or give its new path as model.hf and data.tokenizer in the run's {RECIPE}",
        )


def read_job(folder: Path) -> tuple[Recipe, Plan]:
    """The resolved recipe and the plan of a run folder. Raises RecipeError and DataError."""
    recipe = load_run_recipe(folder)
    path = folder / PLAN
    plan = read_plan(path, SETTINGS, AXES)
    for setting in SETTINGS:
        if setting.key not in plan.strategy.values:
            raise unusable(f"{path}: strategy", f"it has no {setting.key}")
    for violation in broken_rules(plan.strategy, plan.world_size, recipe):
        raise unusable(f"{path}: strategy.{violation.rule.key}", violation.rule.reason)
    layout = layout_of(plan.strategy, plan.world_size)
    if plan.layout != layout:
        raise unusable(f"{path}: layout", f"its strategy gives {layout.degrees}")
    return recipe, plan


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder. After an exception it is kept without its weights, because its logs say why; not after a
    signal (exit code 128 + N), which needs no explanation."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except BaseException as error:
        if getattr(error, "exit_code", 0) > 128 or isinstance(error, KeyboardInterrupt):
            shutil.rmtree(folder, ignore_errors=True)
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        raise
    shutil.rmtree(folder, ignore_errors=True)
