"""`shardwise report`: write the pictures and the page of a run to its folder.

All files are made in memory first, and each replaces its predecessor atomically. So an open page, or a page behind a
web server, is always complete.
"""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.core.answer import Answer
from shardwise.core.atomic_file import write_whole
from shardwise.core.fit_advice import FitAdvice
from shardwise.core.plan import Plan
from shardwise.core.run_files import Outcome, RankMemory, StepRecord
from shardwise.report.mesh import mesh
from shardwise.report.page import render_page
from shardwise.report.pictures import loss_curve, memory_timeline, png
from shardwise.report.pipeline.pictures import figures
from shardwise.report.pipeline.trace import trace_of
from shardwise.report.record import RunRecord, read_run

__all__ = ["Outcome", "RankMemory", "RunRecord", "StepRecord", "read_run", "write_plan_page", "write_report"]


def write_report(folder: Path) -> Path:
    """Write the page and its pictures to a run's folder; return the page's path.

    With several devices this includes `mesh.png`, with a pipeline `pipeline.png` and `schedules.png`.

    Raises:
        DataError: the folder is not a run's, or one of its files cannot be read.
        ResourceError: the folder cannot be written to.
    """
    run = read_run(folder)
    page = run.folder / "report.html"
    write_whole(run.folder / "loss.png", png(loss_curve(run.steps, units=run.plan.step.units)))
    write_whole(run.folder / "memory.png", png(memory_timeline(run.plan)))
    if run.plan.world_size > 1:
        write_whole(run.folder / "mesh.png", png(mesh(run.plan.layout, run.plan.devices_per_node)))
    for name, figure in figures(run.plan, run.outcome.passes if run.outcome else None).items():
        write_whole(run.folder / name, png(figure))
    trace = trace_of(run.plan, run.outcome)
    write_whole(run.folder / "trace.json", json.dumps(trace, separators=(",", ":")).encode())
    write_whole(page, render_page(run).encode("utf-8"))
    return page


def write_plan_page(
    plan: Plan,
    recipe: str,
    path: Path,
    answer: Answer | None = None,
    advice: FitAdvice | None = None,
    name: str = "",
) -> None:
    """Write the page of a plan without a run. ``recipe`` is the resolved recipe, ``name`` the title; else the file's.

    Raises ResourceError if the page cannot be written.
    """
    folder = Path(name) if name else path.with_suffix("")
    run = RunRecord(folder, recipe, plan, (), outcome=None, planned_only=True, answer=answer, advice=advice)
    write_whole(path, render_page(run).encode("utf-8"))
