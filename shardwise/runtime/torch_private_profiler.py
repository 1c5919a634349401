"""Private names of PyTorch that record allocations (see torch_private.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile


def profiled_events(profiled: profile) -> Iterator[Any]:
    """All events of a profile in the order of their beginnings, each with its ``parent``.

    ``events()`` leaves out the pointers of allocations and the stacks of Python.
    """
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    left = list(profiled.profiler.kineto_results.experimental_event_tree())
    events = []
    while left:
        event = left.pop()
        events.append(event)
        left += event.children
    yield from sorted(events, key=lambda event: event.start_time_ns)


def record_allocations(most: int) -> None:
    """Begin to record up to ``most`` allocations and frees of CUDA with stacks of Python. Documented, but private."""
    torch.cuda.memory._record_memory_history(max_entries=most, stacks="python")


def dump_allocations(path: Path) -> None:
    """Write what ``record_allocations`` recorded, and the segments, to a file; end the recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
