"""Signals that ask a run to save and stop, and a second one that ends a run which cannot.

The first signal is passed on to all ranks, which save after the step that runs. After a second one, a second or more
later, the launcher ends the ranks if none of them makes progress for ``STOP_PATIENCE`` seconds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from shardwise.launch.ranks import Rank

STOP_PATIENCE = 5.0
"""Seconds without progress, after a second signal, until the ranks are ended."""

_BURST = 1.0
"""Signals within so many seconds are one request: a scheduler may signal both the job and its processes."""


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, SIGUSR1, and SIGHUP unless it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1] + ([] if ignored else [signal.SIGHUP])


@dataclass
class Stops:
    """The stop signals that a launcher received, with the times of the first and of a second request."""

    numbers: list[int] = field(default_factory=list)
    first: float | None = None
    second: float | None = None

    def receive(self, number: int, now: float) -> None:
        self.numbers.append(number)
        if self.first is None:
            self.first = now
        elif self.second is None and now - self.first >= _BURST:
            self.second = now

    def out_of_patience(self, now: float, quiet_seconds: float) -> bool:
        """Whether the ranks made no progress for ``STOP_PATIENCE`` seconds since the second request."""
        return self.second is not None and min(now - self.second, quiet_seconds) >= STOP_PATIENCE


@contextmanager
def forwarding(ranks: Sequence[Rank]) -> Iterator[Stops]:
    """Pass stop signals on to the ranks during the block. Only a main thread receives signals."""
    stops = Stops()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return

    def forward(number: int, frame: FrameType | None) -> None:
        stops.receive(number, time.monotonic())
        for rank in ranks:
            rank.send(signal.Signals(number))

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
