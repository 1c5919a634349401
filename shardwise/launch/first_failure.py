"""The failure that ends a run, told to the other ranks through the job's store.

A rank that fails breaks the collectives of its peers. Shardwise's launcher sees which rank failed first. Under torchrun
and srun the peers ask here, so that every node's output names that rank, and all ranks end with its exit code: that of
a lost connection would let a scheduler start a run again that fails again. If rank 0 served the store and is gone,
there is no answer.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress

from shardwise.core.errors import RankError
from shardwise.launch.ranks import BROKEN_CONNECTION
from shardwise.runtime.torch_private import default_store

_KEY = "shardwise/failure"


def tell(rank: int, code: int, line: str) -> None:
    """This rank ends with ``code`` and the error ``line``; a connection that others broke is not told."""
    if line and not BROKEN_CONNECTION.search(line):
        with suppress(RuntimeError, ValueError):
            default_store().set(_KEY, json.dumps([rank, socket.gethostname(), code, line]))


def told() -> tuple[int, str] | None:
    """The exit code of the rank that failed first, and an error line that names it; None if no rank has told."""
    with suppress(RuntimeError, ValueError):
        store = default_store()
        if store.check([_KEY]):
            rank, host, code, line = json.loads(store.get(_KEY))
            return code, RankError(f"rank {rank} on {host} failed", why=line.removeprefix("error: ")).line()
    return None
