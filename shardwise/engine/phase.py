"""Which part of the optimizer step is running, and on which micro-batch.

The step announces its phases; the dry run's tracker and the watchdog of a real run read them. A module-level
variable, not a context variable: autograd may run backward hooks on another thread, and there is one step at
a time in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES: tuple[str, ...] = ("setup", "rollout", "forward", "backward", "clip", "optimizer")

_current = "setup"
_micro_batch: int | None = None
_listeners: list[Callable[[str], None]] = []


def current_phase() -> str:
    return _current


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Run a block as phase ``name``, one of PHASES."""
    global _current
    before = _current
    _current = name
    for listener in _listeners:
        listener(name)
    try:
        yield
    finally:
        _current = before


def current_micro_batch() -> int | None:
    """Number of the micro-batch in its step; None outside of micro-batches."""
    return _micro_batch


@contextmanager
def micro_batch(number: int) -> Iterator[None]:
    """Run a block for one micro-batch."""
    global _micro_batch
    before = _micro_batch
    _micro_batch = number
    try:
        yield
    finally:
        _micro_batch = before


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with the name of every phase that begins within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
