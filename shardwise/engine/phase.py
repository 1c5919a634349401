"""Which part of the optimizer step is running.

The step announces its phases; the dry run's tracker and the watchdog of a real run read them. A module-level
variable, not a context variable: autograd may run backward hooks on another thread, and there is one step at
a time in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES: tuple[str, ...] = ("setup", "forward", "backward", "clip", "optimizer")

_current = "setup"
_listeners: list[Callable[[str], None]] = []


def current_phase() -> str:
    return _current


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Run a block as phase ``name``, one of PHASES."""
    global _current
    before, _current = _current, name
    for listener in _listeners:
        listener(name)
    try:
        yield
    finally:
        _current = before


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with the name of every phase that begins within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
