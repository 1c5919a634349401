"""Verifying a strategy: train it and one plain process on the same data, and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.checkpoint.run_folder import scratch, with_date, write_job
from shardwise.core.plan import Plan
from shardwise.core.progress import Progress, silent
from shardwise.data import check_data
from shardwise.data.epochs import with_steps
from shardwise.hardware.cluster import Cluster
from shardwise.jobs.planning import make_plan, refuse_unfit
from shardwise.jobs.request import RunWorkers, refuse_plan_only, require_folders
from shardwise.recipe.sections import Recipe

if TYPE_CHECKING:
    from shardwise.verifier.verdict import Verdict


def verify_plan(
    recipe: Recipe,
    cluster: Cluster,
    run_workers: RunWorkers,
    *,
    plan: Plan | None = None,
    steps: int = 20,
    progress: Progress = silent,
) -> tuple[Plan, Verdict]:
    """Train the plan and one plain process on the same data and compare them.

    Args:
        run_workers: runs the worker processes.
        plan: the plan to verify; None makes one.
        steps: optimizer steps to compare.
        progress: gets a line for each stage.

    Raises:
        ShardwiseError: the data or the plan was refused, or what ``run_workers`` raises; the logs are kept
            then, unless a signal stopped it.
    """
    refuse_plan_only(cluster)
    progress("reading the data")
    recipe = with_date(recipe)
    check_data(recipe)
    recipe = with_steps(recipe)
    require_folders(recipe)
    progress("planning")
    plan = plan or make_plan(recipe, cluster, progress=lambda line: progress(f"planning: {line}"))
    refuse_unfit(plan)
    from shardwise.verifier.verify import read_verdict, shortened  # loads torch

    with scratch("shardwise-verify-") as folder:
        write_job(folder, shortened(recipe, steps), plan)
        for verb, processes in (("reference", 1), ("verify", plan.world_size)):
            progress("training one plain process" if verb == "reference" else f"training {plan.line}")
            run_workers(processes, [verb, str(folder)], folder / "logs", saves=False)
        return plan, read_verdict(folder)
