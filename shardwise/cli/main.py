"""The command ``shardwise`` and its verbs. ``failure.py`` turns their exceptions into a line and an exit code.

Verbs import torch only when they need it. A recipe is read and checked before, so a typing mistake costs a fraction of
a second. typer's own ``main`` answers shells that complete a line, and nothing else: it turns an interruption and a
closed pipe into exit codes silently.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Annotated

import typer

from shardwise import __version__
from shardwise.cli.failure import guarded
from shardwise.cli.terminal_output import dropped_output, keep_writing
from shardwise.core.errors import RecipeError, ResourceError, did_you_mean
from shardwise.core.plugins import OBJECTIVES, plugin
from shardwise.core.plugins import VERBS as PLUGIN_VERBS
from shardwise.core.quiet_torchao import quiet_torchao

app = typer.Typer(
    name="shardwise",
    help="Plans a strategy that fits, says why, and trains exactly that plan.",
    pretty_exceptions_enable=False,
)
_ORDER = (
    "finetune init plan explore data train launch verify generate chat export merge quantize report watch budget fit"
    " from explain doctor eval schema"
)


def _verbs() -> Iterator[tuple[str, ModuleType]]:
    """The modules of the verbs in the order of the help, without those of plugins that are not installed."""
    for name in _ORDER.split():
        module = (
            plugin(PLUGIN_VERBS[name]) if name in PLUGIN_VERBS else import_module(f"shardwise.cli.{name}")
        )
        if module is not None:
            yield name, module


ALL_VERBS = dict(_verbs())
for name, module in ALL_VERBS.items():
    app.command(name=name, cls=getattr(module, "COMMAND", None))(module.command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version and exit", callback=_print_version, is_eager=True),
    ] = False,
) -> None: ...


program = typer.main.get_command(app)
"""Built once: it takes a tenth of a second, and a process may run several commands."""

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The exception that typer raises for a wrong command line: from click, or from typer's own copy of click."""


COMPLETION = "_SHARDWISE_COMPLETE"
"""Set by the scripts of ``--install-completion`` and ``--show-completion``: a shell asks for completions."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with the contract's code: 0, 2 to 7, or 75. 130 after Ctrl-C, 143 after SIGTERM."""
    keep_writing()
    if COMPLETION in os.environ:
        program.main(prog_name="shardwise")
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code == 0 and (lost := dropped_output()) is not None:
        fix = "make room, and run the command again"
        error = ResourceError("the output is incomplete", where="standard output", why=str(lost), fix=fix)
        print(error.line(), file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of one verb."""
    with quiet_torchao():
        return guarded(lambda: _invoked(list(arguments) or ["--help"]))


def _invoked(arguments: list[str]) -> int:
    """Run one verb; returns its exit code. Raises the verb's exceptions, and RecipeError for a wrong command line."""
    try:
        with program.make_context("shardwise", arguments) as context:
            context.command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except UsageError as error:
        raise _usage_error(error) from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    return 0


def _usage_error(error: Exception) -> RecipeError:
    """A wrong verb, option or argument, as one line."""
    context = getattr(error, "ctx", None)
    verb = context.command_path if context else "shardwise"
    what = str(getattr(error, "format_message", lambda: error)()).rstrip(".").replace(": Value error, ", ": ")
    return RecipeError(
        what, where="command line", fix=f"{_nearest_choice(what)} see `{verb} --help`".lstrip()
    )


def _nearest_choice(message: str) -> str:
    """A question for a value that resembles one of an option's choices; "" for any other error."""
    before_choices, _, choices = message.partition("' is not one of ")
    value = before_choices.rpartition("'")[2]
    if not choices or value in OBJECTIVES:  # the name of another objective is not misspelt
        return ""
    return did_you_mean(value, re.findall("'(.*?)'", choices))
