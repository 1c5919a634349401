"""The command ``shardwise``: its verbs, and the one place where errors become a line and an exit code.

Verbs import what they need when they run: a recipe is read and checked before torch is loaded, so a typing
mistake costs a fraction of a second.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from shardwise.cli import data, doctor, export, generate, merge, plan, report, train, verify
from shardwise.core.errors import RecipeError, ShardwiseError

app = typer.Typer(
    name="shardwise",
    help="Plans a strategy that fits, says why, and trains exactly that plan.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (plan, data, train, verify, generate, export, merge, report, doctor):
    app.command(name=verb.__name__.rpartition(".")[2])(verb.command)


UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line. It is click's class, or that of typer's own copy of click."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with the contract's code: 0, 2 to 7, or 75. 130 after an interruption."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """The exit code of one verb."""
    try:
        arguments = arguments or ["--help"]
        result = typer.main.get_command(app).main(list(arguments), "shardwise", standalone_mode=False)
    except ShardwiseError as error:
        return _fail(error)
    except UsageError as error:
        return _fail(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (``| head``); nothing is wrong with the run.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # A fault of ours, or of a user's own model: still one line, and the trace on request.
        what = f"{type(error).__name__}: {error}"
        again = "SHARDWISE_TRACE=1 shows where; please report it if it is not your model's"
        return _fail(ShardwiseError("unexpected failure", why=what, fix=again))
    return result if isinstance(result, int) else 0


def _usage(error: Exception) -> RecipeError:
    """A wrong verb, option or argument, as one line."""
    context = getattr(error, "ctx", None)
    verb = context.command_path if context else "shardwise"
    what = str(getattr(error, "format_message", lambda: error)()).rstrip(".")
    return RecipeError(what, where="command line", fix=f"see `{verb} --help`")


def _fail(error: ShardwiseError) -> int:
    if os.environ.get("SHARDWISE_TRACE"):
        traceback.print_exc()
    print(error.line(), file=sys.stderr)
    return error.exit_code
