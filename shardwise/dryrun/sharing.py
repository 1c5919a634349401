"""Dry runs that serve several accelerators of one kind, which differ in seconds, capacity and workspaces alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_shared_results: ContextVar[dict[tuple[object, ...], Any] | None] = ContextVar("_runs", default=None)


@contextmanager
def sharing_dry_runs() -> Iterator[None]:
    """In this block no dry run is made twice (dryrun/run.py), and what it counted is kept.

    All calls are for one blueprint, and for one recipe but for its cluster.
    """
    token = _shared_results.set({})
    try:
        yield
    finally:
        _shared_results.reset(token)


def shared_dry_runs() -> dict[tuple[object, ...], Any] | None:
    """Dry runs of the block, by all that they depend on; None outside of one."""
    return _shared_results.get()
