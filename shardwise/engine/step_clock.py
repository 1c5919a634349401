"""Seconds of a step by phase, and of its operations, on one rank.

``PhaseClock`` reads a clock per phase. On accelerators it records events in the stream, which are read when the step
has ended. ``OperationClock`` surrounds every operation with Python, so a step of small kernels takes several times
longer under it. It is only for hosts whose operations block: an accelerator's return before they are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.phase import current_phase, listening
from shardwise.hardware.kinds import kind_of
from shardwise.runtime.torch_private import TorchDispatchMode

RecordCall = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any, float], None]
"""Called with an operation, its arguments, its result and its seconds."""


class PhaseClock:
    """Times the phases of one step. A phase lasts until the next begins, the last one to the end of the step.

    What comes before the first one belongs to "setup".
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if kind_of(device).is_host else torch.get_device_module(device)
        self._marks: list[tuple[str, Any]] = []

    @contextmanager
    def over(self) -> Iterator[None]:
        """Enclose the step."""
        self._begin(current_phase())
        with listening(self._begin):
            yield
        self._begin("")

    def read(self) -> dict[str, float]:
        """Seconds by phase, in the order of their first beginning. Waits for the device."""
        if self._device is not None and self._marks:
            self._marks[-1][1].synchronize()
        spent: dict[str, float] = {}
        # A phase comes once for each micro-batch: its seconds add up.
        for (name, begin), (_, end) in pairwise(self._marks):
            spent[name] = spent.get(name, 0.0) + self._between(begin, end)
        return spent

    def _begin(self, name: str) -> None:
        if self._device is None:
            self._marks.append((name, time.perf_counter()))
            return
        event = self._device.Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))

    def _between(self, begin: Any, end: Any) -> float:
        if self._device is None:
            return float(end - begin)
        return float(begin.elapsed_time(end) / 1000)  # elapsed_time is in milliseconds


class OperationClock(TorchDispatchMode):
    """Calls ``record`` after every operation on local tensors in its ``with`` block that is ``wanted``."""

    def __init__(self, record: RecordCall, wanted: Callable[[Any], bool] = lambda func: True) -> None:
        super().__init__()
        self._record = record
        self._wanted = wanted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor then calls operations on local tensors, which come here again
        kwargs = kwargs or {}
        if not self._wanted(func):
            return func(*args, **kwargs)
        begin = time.perf_counter()
        out = func(*args, **kwargs)
        self._record(func, args, kwargs, out, time.perf_counter() - begin)
        return out


def communicates(func: Any) -> bool:
    """Whether an operation sends, receives, or waits for a message."""
    return func.namespace in ("c10d", "_c10d_functional")
