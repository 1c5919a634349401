"""``shardwise explore``: a page whose every point is a dry run."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import Overrides, path_option
from shardwise.cli.spinner import planning
from shardwise.core.errors import RecipeError
from shardwise.core.plugins import require_plugin
from shardwise.core.progress import Progress
from shardwise.recipe.installed import recipe_file

if TYPE_CHECKING:
    from shardwise.plugins.explorer.exploration import Exploration
    from shardwise.report.record import RunRecord

REWRITTEN = 3.0
"""Seconds between two writings of a page that fills."""


def command(
    recipe: Annotated[
        Path,
        typer.Argument(
            help="the recipe, a YAML file; an installed one by its name; or the folder of a run",
            parser=recipe_file,
            metavar="RECIPE",
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, path_option("the page; default: explore.html")] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="serve the page on 127.0.0.1; it predicts further points when asked"),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="begin no dry run after so many seconds; default: 60, no limit with --serve", min=0
        ),
    ] = None,
    run: Annotated[
        Path | None, path_option("folder of a run, whose measured figures are shown", "DIR")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="with --serve: port on 127.0.0.1; default: a free one", min=0, max=65535),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="open the page in the default browser")
    ] = False,
) -> None:
    """Write a page to explore what if: other devices, batches, precisions, adapters, recomputation, sharding, offload.

    Every point is a dry run of its recipe, which the page copies. With --serve the page fills while you look, until you
    press Ctrl-C.
    """
    if port is not None and not serve:
        raise RecipeError("--port needs --serve", where="command line")
    if out is not None and serve:
        raise RecipeError("--out and --serve exclude each other", where="command line", fix="leave one out")
    began = time.monotonic()
    file = recipe / "recipe.yaml" if recipe.is_dir() else recipe
    with planning() as progress:
        exploration = _exploration(file, overrides or [], recipe, run, progress)
        limit = math.inf if serve else 60.0
        left = (limit if seconds is None else seconds) - (time.monotonic() - began)
        if serve:
            _serve(exploration, left, port or 0, open_browser, progress)
        else:
            _fill_page(exploration, left, out or Path("explore.html"), open_browser, progress)


def _exploration(
    file: Path, overrides: list[str], recipe: Path, run: Path | None, progress: Progress
) -> Exploration:
    from shardwise.jobs.request import measured_cluster, read_request

    measured_cluster(read_request(file, overrides)[0])  # a fault is said before torch is loaded
    from shardwise.plugins.explorer.exploration import Exploration
    from shardwise.report.record import read_run

    folder = recipe if recipe.is_dir() else run
    measured: RunRecord | None = None if folder is None else read_run(folder)
    name = recipe.resolve().name if recipe.is_dir() else recipe.stem
    return Exploration(file, overrides, name, measured, progress)


def _fill_page(exploration: Exploration, seconds: float, path: Path, show: bool, progress: Progress) -> None:
    from shardwise.plugins.explorer.page import write_page

    written = -math.inf

    def changed() -> None:
        nonlocal written
        progress(f"{exploration.predicted} points in {path}")
        if time.monotonic() > written + REWRITTEN:
            write_page(exploration, path)
            if show and written < 0:
                webbrowser.open(path.resolve().as_uri())
            written = time.monotonic()

    exploration.fill(seconds, changed)
    write_page(exploration, path)
    progress("")
    typer.echo(f"explorer: {path} ({exploration.in_words})")


def _serve(exploration: Exploration, seconds: float, port: int, show: bool, progress: Progress) -> None:
    from shardwise.plugins.explorer.page import ExplorationPage

    live = require_plugin("live.server", "--serve")
    with live.page_server(ExplorationPage(exploration), port) as server:
        address = f"http://{live.LOOPBACK}:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, daemon=True)

        def changed() -> None:
            if not thread.is_alive():  # from the first point on: the processes that predict are forked before
                thread.start()
                typer.echo(f"exploring {exploration.name}: {address}")
                if show:
                    webbrowser.open(address)
            progress(f"{exploration.predicted} points at {address}")

        with contextlib.suppress(KeyboardInterrupt):
            exploration.fill(seconds, changed)
            while True:
                exploration.answer_asked(changed, wait=None)
