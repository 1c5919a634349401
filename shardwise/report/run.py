"""`shardwise report`: the pictures and the page of a run, written into its folder.

Everything is made in memory first and every file replaces its predecessor in one go: a page that somebody has
open, or that a web server hands out while the run goes on, is never half of one.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.core.plan import Plan
from shardwise.core.whole_file import write_whole
from shardwise.report.mesh import mesh
from shardwise.report.page import render_page
from shardwise.report.pictures import loss_curve, memory_timeline, png
from shardwise.report.pipeline import planned_and_measured, side_by_side
from shardwise.report.record import Outcome, RankMemory, RunRecord, StepRecord, read_run

__all__ = ["Outcome", "RankMemory", "RunRecord", "StepRecord", "read_run", "write_plan_page", "write_report"]


def write_report(folder: Path) -> Path:
    """Write the page and its pictures into a run's folder; returns the page's path.

    Of several devices `mesh.png` is one of them, and of a pipeline `pipeline.png` and `schedules.png`.

    Raises:
        DataError: the folder is not a run's, or a file of it cannot be read.
        ResourceError: the folder cannot be written to.
    """
    run = read_run(folder)
    page = run.folder / "report.html"
    write_whole(run.folder / "loss.png", png(loss_curve(run.steps)))
    write_whole(run.folder / "memory.png", png(memory_timeline(run.plan)))
    if run.plan.world_size > 1:
        write_whole(run.folder / "mesh.png", png(mesh(run.plan.layout, run.plan.devices_per_node)))
    if run.plan.pipeline is not None:
        passes = run.outcome.passes if run.outcome else None
        write_whole(run.folder / "pipeline.png", png(planned_and_measured(run.plan.pipeline, passes)))
        write_whole(run.folder / "schedules.png", png(side_by_side(run.plan.pipeline)))
    write_whole(page, render_page(run).encode("utf-8"))
    return page


def write_plan_page(plan: Plan, recipe: str, path: Path) -> None:
    """Write the page of a plan alone. ``recipe`` is the resolved one.

    Raises ResourceError when it cannot be written.
    """
    run = RunRecord(path.with_suffix(""), recipe, plan, steps=(), outcome=None, planned_only=True)
    write_whole(path, render_page(run).encode("utf-8"))
