"""``shardwise doctor``: this machine's hardware, and whether it can train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import AsJson
from shardwise.cli.spinner import working
from shardwise.core.plugins import require_plugin


def command(
    as_json: AsJson = False,
    store: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="measure kernels, collectives and steps of this machine, and keep them for its plans",
        ),
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="also measure communication between processes")
    ] = False,
) -> None:
    """Print the devices, memory and speeds of this machine, with faults and advice."""
    from rich.console import Console

    calibration = require_plugin("calibration.store", "--calibrate") if store else None
    with working("measuring this machine"):
        from shardwise.plugins.doctor.checks import examine, render

        diagnosis = examine(Path.cwd(), link=link or store)
    if as_json:
        print(json.dumps(diagnosis.data(), indent=1))
    else:
        render(diagnosis, Console())
    if calibration is not None:
        typer.echo("measuring kernels, collectives and steps; it takes about a minute", err=True)
        for path in calibration.calibrated(diagnosis, Path.cwd()):
            typer.echo(f"stored: {path}", err=as_json)
    if (error := diagnosis.error()) is not None:
        raise error
