"""The error line of a rank that an unexpected exception ends: its type, its first line, and whose code raised it."""

from __future__ import annotations

import os
import re
import socket
import traceback

from shardwise.core.errors import RankError
from shardwise.launch.placement import LAUNCHER
from shardwise.launch.ranks import BROKEN_CONNECTION
from shardwise.launch.user_code import Frame, innermost_of_user

_GLOO = re.compile(r"^\[\S*/(gloo/\S+)\] (.*?)\. .*")
"""A lost connection, as gloo says it: file and line of its source, what happened and the peer's address, and advice."""


def has_log() -> bool:
    """Whether the standard error of this process is its log. Under torchrun and srun it is the job's."""
    return LAUNCHER in os.environ


def rank_failure(error: BaseException, rank: int) -> RankError:
    """The error to report for an exception that is not Shardwise's own. The rest of the text is in the trace."""
    calls = [
        Frame(call.filename, call.lineno or 0, call.name)
        for call in traceback.extract_tb(error.__traceback__)
    ]
    users = innermost_of_user(reversed(calls))
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    first = _GLOO.sub(r"\2 (\1)", first)
    why = f"{type(error).__name__}: {first}" if first else type(error).__name__
    what, fix = f"rank {rank} failed", f"the trace is in rank-{rank}.log"
    if not has_log():
        what, fix = f"rank {rank} on {socket.gethostname()} failed", "the trace is above"
        if BROKEN_CONNECTION.search(why):
            fix = "another rank was lost first, see its output; the same command resumes"
    where = f"your model, {users}" if users else str(calls[-1]) if calls else ""
    return RankError(what, where=where, why=why, fix=fix)
