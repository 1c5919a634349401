"""``shardwise report``: write the page of a run again, finished or still running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(folder: Annotated[Path, typer.Argument(help="folder of a run", metavar="DIR")]) -> None:
    """Write one self-contained HTML page and its pictures into the run's folder."""
    from shardwise.report.record import read_run
    from shardwise.report.run import write_report
    from shardwise.report.step_times import step_sentences

    page, run = write_report(folder), read_run(folder)
    for sentence in step_sentences(run.plan, run.outcome):
        typer.echo(sentence)
    typer.echo(f"report: {page}")
