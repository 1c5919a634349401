"""`shardwise report`: the pictures and the page of a run, written into its folder.

Everything is made in memory first and every file replaces its predecessor in one go: a page that somebody has
open, or that a web server hands out while the run goes on, is never half of one.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.core.errors import ResourceError
from shardwise.report.page import render_page
from shardwise.report.pictures import loss_curve, memory_timeline, png
from shardwise.report.record import Outcome, RankMemory, RunRecord, StepRecord, read_run

__all__ = ["Outcome", "RankMemory", "RunRecord", "StepRecord", "read_run", "write_report"]


def write_report(folder: Path) -> Path:
    """Write `report.html`, `loss.png` and `memory.png` into the folder of a run; returns the page's path.

    Raises:
        DataError: the folder is not a run's, or a file of it cannot be read.
        ResourceError: the folder cannot be written to.
    """
    run = read_run(folder)
    page = run.folder / "report.html"
    _replace(run.folder / "loss.png", png(loss_curve(run.steps)))
    _replace(run.folder / "memory.png", png(memory_timeline(run.plan)))
    _replace(page, render_page(run).encode("utf-8"))
    return page


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot write {path.name}", where=str(path), why=error.strerror or str(error)
        ) from error
