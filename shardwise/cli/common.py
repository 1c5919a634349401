"""Arguments and options that several verbs have, and how verbs run worker processes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.core.paths import path_of
from shardwise.recipe.installed import recipe_file

RecipeArgument = Annotated[
    Path,
    typer.Argument(
        help="the recipe, a YAML file; an installed one by its name", parser=recipe_file, metavar="RECIPE"
    ),
]


def local_path(text: str) -> Path:
    """The file or folder that a command names. An empty text, from an unset variable, is not the current folder."""
    if not text:
        raise typer.BadParameter("the name of the file or folder is empty")
    return path_of(text)


def local_file(text: str) -> Path:
    """As ``local_path``, of a file: a folder is refused before the work whose result would go into it."""
    path = local_path(text)
    if path.is_dir():
        raise typer.BadParameter(f"{text} is a folder; name a file")
    return path


def path_argument(help: str, metavar: str) -> Any:
    """An argument that names a file or folder."""
    return typer.Argument(help=help, parser=local_path, metavar=metavar)


def path_option(help: str, metavar: str = "FILE") -> Any:
    """An option that names a file, or with another metavar than FILE a folder."""
    return typer.Option(help=help, parser=local_file if metavar == "FILE" else local_path, metavar=metavar)


ModelFolder = Annotated[Path, path_argument("folder of a run, or of a model in Hugging Face's format", "DIR")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, replaces the recipe's value", metavar="KEY=VALUE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def run_workers(processes: int, arguments: Sequence[str], logs: Path, *, saves: bool = True) -> None:
    """Run workers to their end; rank 0 writes to this process's output, and a failure is one line on standard error.

    Raises typer.Exit when they fail, with that line as its text.
    """
    from shardwise.launch.launcher import run_ranks

    code, line = run_ranks(processes, arguments, logs, _terminal(), aloud=True, saves=saves)
    if line:
        print(line, file=sys.stderr, flush=True)
    if code:
        end = typer.Exit(code)
        end.args = (line or "stopped on request",)
        raise end


def _terminal() -> dict[str, str]:
    """Rank 0 writes into a pipe of the launcher's: these variables describe the terminal at its other end."""
    if not sys.stdout.isatty():
        return {}
    return {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}


def next_lines(commands: Sequence[tuple[str, str]]) -> list[str]:
    """The block of the next commands, each with what it does. A shell takes a line as it is."""
    width = max((len(command) for command, _ in commands), default=0)
    return ["next:", *(f"  {command:{width}}  # {what}" for command, what in commands)] if commands else []
