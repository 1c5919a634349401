"""Whether other processes use the cores that a measurement needs.

CPU seconds say it; the load average does not: it still counts what ended a minute ago, such as the installation before
a first plan, and does not yet count what began with the measurement.
"""

from __future__ import annotations

import os
import time

import psutil

from shardwise.hardware.this_machine import usable_cores

MAX_OTHER_WORK = 0.25
"""The share of this process's cores that others may use of a machine that counts as idle: a desktop's own work."""
SAMPLE = 0.3
"""Seconds that `is_busy_now` looks at; the system counts in hundredths of a second."""


class OtherWork:
    """The CPU time that other processes use from here on."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._machine = _machine_seconds()
        self._own = _own_seconds()

    def own_seconds(self) -> float:
        """CPU seconds of this process, and of its children that have ended."""
        return _own_seconds() - self._own

    def cores(self, own_seconds: float | None = None) -> float:
        """How many of the cores that this process may use others used, on average; 0 if so few that it counts as idle.

        Others first fill the cores that are not this process's: a container may have few of a large host's.

        Args:
            own_seconds: CPU seconds of all processes that are no others; default: ``own_seconds()``.
        """
        own = self.own_seconds() if own_seconds is None else own_seconds
        cpu_seconds = _machine_seconds() - self._machine - own
        used = cpu_seconds / max(time.monotonic() - self._begin, 1e-3)
        usable = usable_cores()
        taken = min(used - max(0, (os.cpu_count() or 1) - usable), usable)
        return taken if taken > MAX_OTHER_WORK * usable else 0.0


def is_busy_now() -> bool:
    """Whether other processes use this process's cores at the moment."""
    work = OtherWork()
    time.sleep(SAMPLE)
    return work.cores() > 0


def _own_seconds() -> float:
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


def _machine_seconds() -> float:
    """CPU seconds of all processes of the machine; 0 where the system does not tell: then no other work is seen."""
    try:
        machine = psutil.cpu_times()
    except OSError:
        return 0.0
    # A hypervisor's other guests (steal) slow a measurement as well. Guests' time is part of the user's time.
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
    return float(sum(machine) - idle - guests)
