"""``shardwise watch``: the page of a run, in a browser on this machine, while it trains."""

from __future__ import annotations

import contextlib
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import path_argument

PAGE_PORT = 7465


def command(
    run: Annotated[Path, path_argument("folder of a run", "DIR")],
    port: Annotated[
        int, typer.Option(help="port on 127.0.0.1; 0 takes a free one", min=0, max=65535)
    ] = PAGE_PORT,
    open_browser: Annotated[
        bool, typer.Option("--open", help="open the page in the default browser")
    ] = False,
) -> None:
    """Serve the page of a run on 127.0.0.1; it follows the run until you press Ctrl-C."""
    _await(run)
    from shardwise.plugins.live.page import LiveRun
    from shardwise.plugins.live.server import LOOPBACK, page_server

    with page_server(LiveRun(run), port) as server:
        address = f"http://{LOOPBACK}:{server.server_port}/"
        typer.echo(f"watching {run}: {address}")
        if open_browser:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _await(run: Path) -> None:
    """Wait until the run is planned. Raises DataError where there is no such folder."""
    from shardwise.core.errors import DataError

    waiting = False
    while not all((run / name).exists() for name in ("recipe.yaml", "plan.json")):
        if not run.is_dir():
            fix = "give the folder that train --out had"
            raise DataError("not the folder of a run", where=str(run), why="there is no such folder", fix=fix)
        if not waiting:
            typer.echo(f"waiting for the plan of {run}")
        waiting = True
        time.sleep(0.5)
