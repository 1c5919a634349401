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
        self._others = _others_seconds()

    def is_much(self) -> bool:
        """Whether other processes used cores that this process and its children may use.

        Others first fill the cores that are not this process's: a container may have few of a large host's.
        """
        cpu_seconds = _others_seconds() - self._others
        used = cpu_seconds / max(time.monotonic() - self._begin, 1e-3)  # in cores
        own = usable_cores()
        other_cores = max(0, (os.cpu_count() or 1) - own)
        return used > other_cores + MAX_OTHER_WORK * own


def is_busy_now() -> bool:
    """Whether other processes use this process's cores at the moment."""
    work = OtherWork()
    time.sleep(SAMPLE)
    return work.is_much()


def _others_seconds() -> float:
    """CPU seconds of the machine without those of this process and of its children that have ended.

    0 where the system does not tell: then no other work is seen.
    """
    try:
        machine = psutil.cpu_times()
        own = os.times()
    except OSError:
        return 0.0
    # A hypervisor's other guests (steal) slow a measurement as well. Guests' time is part of the user's time.
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
    return sum(machine) - idle - guests - (own.user + own.system + own.children_user + own.children_system)
