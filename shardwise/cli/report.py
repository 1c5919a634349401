"""``shardwise report``: write the page of a run again, finished or still running, or compare several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import path_argument, path_option
from shardwise.cli.spinner import working
from shardwise.core.errors import RecipeError
from shardwise.core.plugins import require_plugin


def command(
    folders: Annotated[
        list[Path],
        path_argument("folder of a run; of several to compare", "DIR…"),
    ],
    out: Annotated[
        Path | None,
        path_option("the page that compares runs; default: compare.html"),
    ] = None,
) -> None:
    """Write one self-contained HTML page and its pictures into the run's folder; of several runs, a comparison."""
    if len(folders) > 1:
        page = out or Path("compare.html")
        comparison = require_plugin("compare.page", "several runs")
        with working("drawing the page"):
            comparison.write_comparison(folders, page)
        typer.echo(f"comparison: {page}")
        return
    if out is not None:
        raise RecipeError("--out is for several runs", where="command line", fix="leave it out")
    with working("drawing the page"):
        from shardwise.report.record import read_run
        from shardwise.report.run import write_report
        from shardwise.report.step_times import step_sentences

        page, run = write_report(folders[0]), read_run(folders[0])
    for sentence in step_sentences(run.plan, run.outcome):
        typer.echo(sentence)
    typer.echo(f"report: {page}")
