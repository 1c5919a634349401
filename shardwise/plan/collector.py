"""The garbage collector during a plan: thousands of small objects of each dry run, and a million of imported modules.

A full collection walks all of them, for a fifth of a plan's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = 20_000
"""Objects between two collections of the youngest; Python's default is 700."""

_depth = 0


@contextmanager
def frozen() -> Iterator[None]:
    """Exempt all existing objects from collection, and collect new ones less often.

    Within another ``frozen``, objects that have come into being since are exempt, too. Processes that are forked then
    share the pages of all of them.
    """
    global _depth
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, *before[1:])
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            gc.set_threshold(*before)
            gc.unfreeze()
