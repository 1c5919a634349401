"""The one place where what went wrong becomes a line on standard error and an exit code, for every process of the
command line: the command itself, and those in which planning leaves its traces.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from shardwise.core.errors import ShardwiseError

INTERRUPTED = 130


def guarded(action: Callable[[], int]) -> int:
    """The exit code that ``action`` returns, or that of what it raises, which is told."""
    try:
        return action()
    except ShardwiseError as error:
        return _told(error)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        from shardwise.train.shortage import resource_error

        fix = "ask for less at once, or take a device with more memory"
        return _told(resource_error(error, "this process", fix) or _unexpected(error))


def _unexpected(error: Exception) -> ShardwiseError:
    """A fault of ours, or of a user's own model: still one line, and the trace on request."""
    what = f"{type(error).__name__}: {error}"
    again = "SHARDWISE_TRACE=1 shows where; please report it if it is not your model's"
    return ShardwiseError("unexpected failure", why=what, fix=again)


def _told(error: ShardwiseError) -> int:
    if os.environ.get("SHARDWISE_TRACE"):
        traceback.print_exc()
    print(error.line(), file=sys.stderr)
    return error.exit_code
