"""Python's garbage collector, where it would walk a million objects of imported modules for nothing.

A full collection walks all objects: a fifth of the time of imports and of a plan, and a second at exit.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = 20_000
"""Objects between two collections of the youngest; Python's default is 700."""

_pause_depth = 0


@contextmanager
def paused() -> Iterator[None]:
    """No collection in this block, which imports modules: they are not garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """Exempt all existing objects from collection, and collect new ones less often.

    Within another ``frozen``, objects that have come into being since are exempt, too. Processes that are forked then
    share the pages of all of them.
    """
    global _pause_depth
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, *before[1:])
    _pause_depth += 1
    try:
        yield
    finally:
        _pause_depth -= 1
        if _pause_depth == 0:
            gc.set_threshold(*before)
            gc.unfreeze()


def not_at_exit() -> None:
    """Exempt all objects from the collections at the end of this process, whose memory the system takes back."""
    atexit.register(gc.freeze)
