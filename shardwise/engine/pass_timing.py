"""Start and end of each pass of a step on this rank, for the report's picture of a measured step.

The executor reports what it computes (``computing``), after the inputs of a pass have arrived. The training loop
records one step (``recording``); other steps record nothing. Accelerators record events in the stream, which are read
when the run has ended, so the step does not wait. Only before it begins does the host synchronise once, to relate the
device's clock to the time of day. Ranks are aligned by the time of day: exact within a machine, else as good as their
clocks.

A module-level variable, as in phase.py. Refused: the profiler, which slows the step; and a barrier as common origin,
which ranks leave at different times on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from shardwise.hardware.kinds import kind_of


class Pass(Protocol):
    """One pass of one micro-batch through one stage."""

    @property
    def kind(self) -> str: ...

    @property
    def stage(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...


TimedPass = tuple[Pass, float, float]
"""A pass, and when it began and ended, in seconds of the time of day."""


class Spans:
    """The passes of one step. Made right before it; read when it has ended on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if kind_of(device).is_host else torch.get_device_module(device)
        self._passes: list[tuple[Pass, Any, Any]] = []
        self._origin: Any
        if self._device is None:
            self._origin, self._clock = _time_of_day()
        else:
            self._origin = self.mark()
            # The event is now reached on the device, so the time of day read next is its own.
            self._device.synchronize(device)
            self._clock = time.time()

    def mark(self) -> Any:
        """Now: a number on the CPU, an event in the current stream elsewhere."""
        if self._device is None:
            return time.perf_counter()
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def add(self, action: Pass, begin: Any) -> None:
        """A pass that began at a mark ends now."""
        self._passes.append((action, begin, self.mark()))

    def read(self) -> list[TimedPass]:
        """All passes in their order. Waits for the device where it has not done them yet."""
        if self._device is not None and self._passes:
            self._passes[-1][2].synchronize()  # a stream is in order, so all earlier events have passed too
        return [(action, self._at(begin), self._at(end)) for action, begin, end in self._passes]

    def _at(self, mark: Any) -> float:
        """The time of day at a mark."""
        if self._device is None:
            return float(self._clock + mark - self._origin)
        return float(self._clock + self._origin.elapsed_time(mark) / 1000)  # elapsed_time is in milliseconds


def _time_of_day() -> tuple[float, float]:
    """A mark on the CPU and the time of day at it: of several tries the one that was interrupted least."""
    tries = [(time.perf_counter(), time.time(), time.perf_counter()) for _ in range(5)]
    before, now, after = min(tries, key=lambda reading: reading[2] - reading[0])
    return (before + after) / 2, now


_recording: Spans | None = None


@contextmanager
def recording(device: torch.device) -> Iterator[Spans]:
    """Write down the passes that begin within the block."""
    global _recording
    spans = _recording = Spans(device)
    try:
        yield spans
    finally:
        _recording = None


@contextmanager
def computing(action: Pass) -> Iterator[None]:
    """Run a block as what a pass computes."""
    spans = _recording
    if spans is None:
        yield
        return
    begin = spans.mark()
    yield
    spans.add(action, begin)
