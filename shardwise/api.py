"""The public interface for Python: what the command line does, without printing.

``train`` starts one process per device of this machine and returns when they are done; it is the caller's
process only that plans. What those processes print is in their logs, and why they failed in the error. Everything else
in the package may change between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.cli.shortage import catch_up, plan_remembering
from shardwise.core.cluster import Cluster, cluster_of
from shardwise.core.errors import Preempted, RankError
from shardwise.core.plan import Plan
from shardwise.core.recipe import Recipe, load_recipe
from shardwise.model.blueprint import blueprint_of
from shardwise.plan.search import plan_for
from shardwise.report.run import RunRecord, read_run, write_report
from shardwise.serve.report import record_sample
from shardwise.serve.requests import Request
from shardwise.serve.sampling import Sampling
from shardwise.serve.serving import Piece, ServedModel, load_model
from shardwise.technique import SETTINGS
from shardwise.train.export_run import export_run
from shardwise.train.folder import PAGE, claim, prepare, scratch
from shardwise.train.launch import run_ranks
from shardwise.train.start import check_start, finished
from shardwise.train.verify import Verdict, read_verdict, shortened

__all__ = [
    "Cluster",
    "Piece",
    "Plan",
    "Recipe",
    "Request",
    "Sampling",
    "ServedModel",
    "export",
    "load",
    "load_model",
    "merge",
    "plan",
    "train",
    "verify",
]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe; ``overrides`` are ``section.key=value``. Raises RecipeError."""
    return load_recipe(Path(path), list(overrides), SETTINGS)


def plan(recipe: Recipe, cluster: Cluster | None = None) -> Plan:
    """Choose what the recipe does not pin, and predict; ``cluster`` instead of the recipe's own."""
    return plan_for(recipe, blueprint_of(recipe), cluster or cluster_of(recipe.cluster))


def train(recipe: Recipe, plan: Plan, out: str | Path, *, exact_memory: bool = False) -> RunRecord:
    """Train exactly ``plan`` on this machine into the folder ``out``; resumes when it holds a checkpoint.

    With a smaller micro-batch where memory ran out with this one, in this run or before it in this folder. Where all
    steps are done the folder is left as it is. Raises RankError, which says why, when the run fails or is stopped;
    more is in ``out``/logs.
    """
    folder = Path(out)
    with claim(folder):
        check_start(recipe, folder)
        done = finished(recipe, folder)
        if not done:
            _train(recipe, plan, folder, ["--exact-memory"] if exact_memory else [])
        if not done or not (folder / PAGE).exists():
            _report(recipe, folder)
    return read_run(folder)


def _train(recipe: Recipe, plan: Plan, folder: Path, flags: list[str]) -> None:
    plan = plan_remembering(recipe, cluster_of(recipe.cluster), folder, plan)[0]
    prepare(folder, recipe, plan)
    _launched(plan.world_size, ["train", str(folder), *flags], folder)


def _report(recipe: Recipe, folder: Path) -> None:
    catch_up(recipe, cluster_of(recipe.cluster), folder)
    record_sample(folder)
    write_report(folder)


def export(run: str | Path, out: str | Path, *, dtype: str | None = None) -> Path:
    """Write the newest checkpoint of the run in the folder ``run`` as a folder that transformers loads.

    ``dtype`` is fp32, bf16 or fp16; None takes what the run computed in.
    """
    return export_run(Path(run), Path(out), dtype)[0].folder


def merge(
    base: str | Path, adapter: str | Path, out: str | Path, *, dtype: str | None = None, undo: bool = False
) -> Path:
    """Write the model of the folder or hub id ``base`` with an adapter of PEFT's format added into its weights.

    With ``undo``, the base of what was merged so. ``dtype`` is fp32, bf16 or fp16; None takes what the base has.
    """
    from shardwise.train.merge import merge, unmerge  # transformers takes seconds

    if undo:
        return unmerge(str(base), Path(adapter), Path(out), dtype).folder
    return merge(str(base), Path(adapter), Path(out), dtype)[0].folder


def verify(recipe: Recipe, plan: Plan, *, steps: int = 20) -> Verdict:
    """Train ``plan`` and one plain process on the same data for ``steps`` steps and compare them.

    Raises RankError, which says why, when a process fails; its logs stay then.
    """
    with scratch("shardwise-verify-") as folder:
        prepare(folder, shortened(recipe, steps), plan)
        _launched(1, ["reference", str(folder)], folder)
        _launched(plan.world_size, ["verify", str(folder)], folder)
        return read_verdict(folder)


def _launched(processes: int, arguments: list[str], folder: Path) -> None:
    code, line = run_ranks(processes, arguments, folder / "logs")
    if code == Preempted.exit_code:
        why = "it was asked to stop, and has saved: the same call goes on from there"
        raise RankError("the run stopped", where=str(folder / "logs"), why=why)
    if code != 0:
        raise RankError("the run failed", where=str(folder / "logs"), why=line.removeprefix("error: "))
