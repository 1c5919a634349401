"""Turns an exception into one line on standard error and an exit code, for every process of the command line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from shardwise.core.errors import ShardwiseError

INTERRUPTED = 130


def guarded(action: Callable[[], int]) -> int:
    """Run ``action``; returns its exit code. An exception is printed as one line, and its exit code returned."""
    try:
        return action()
    except ShardwiseError as error:
        return _reported(error)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if _interrupted(error):
            print("error: interrupted", file=sys.stderr)
            return INTERRUPTED
        from shardwise.trainer.faults.oom_record import resource_error

        fix = "ask for less at once, or take a device with more memory"
        return _reported(resource_error(error, "this process", fix) or _unexpected(error))


def _interrupted(error: BaseException) -> bool:
    """Whether an interruption led to an error, as in a module whose import it cut short."""
    cause = error.__cause__ or error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _interrupted(cause))


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
