"""Turns an exception into one line on standard error and an exit code, for every process of the command line."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from shardwise.core.errors import ShardwiseError


class Terminated(KeyboardInterrupt):
    """SIGTERM. It unwinds the stack as Ctrl-C does, so that child processes and temporary files are removed."""


def guarded(action: Callable[[], int]) -> int:
    """Run ``action``; returns its exit code. An exception is printed as one line, and its exit code returned."""
    try:
        return action()
    except ShardwiseError as error:
        return _reported(error)
    except KeyboardInterrupt as interruption:
        return _interrupted(interruption)
    except Exception as error:
        if (cause := _interruption_behind(error)) is not None:
            return _interrupted(cause)
        from shardwise.trainer.faults.oom_record import resource_error

        fix = "ask for less at once, or take a device with more memory"
        return _reported(resource_error(error, "this process", fix) or _unexpected(error))


def _interrupted(interruption: KeyboardInterrupt) -> int:
    """Print the line; returns the exit code with which a shell reports the signal."""
    print("error: interrupted", file=sys.stderr)
    return 128 + (signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT)


def _interruption_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The interruption that led to an error, as in a module whose import it cut short."""
    cause = error.__cause__ or error.__context__
    if cause is None or isinstance(cause, KeyboardInterrupt):
        return cause
    return _interruption_behind(cause)


def _unexpected(error: Exception) -> ShardwiseError:
    """A bug of Shardwise or of the user's own model, as one line; the trace is printed on request."""
    what = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    again = "SHARDWISE_TRACE=1 shows where; please report it if it is not your model's"
    return ShardwiseError("unexpected failure", why=what, fix=again)


def _reported(error: ShardwiseError) -> int:
    if os.environ.get("SHARDWISE_TRACE"):
        traceback.print_exc()
    print(error.line(), file=sys.stderr)
    return error.exit_code
