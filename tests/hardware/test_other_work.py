"""Work of others is told by their CPU time: not own work, not work on cores that are not ours, not work that ended."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from shardwise.hardware import other_work
from shardwise.hardware.other_work import OtherWork

SPIN = "import time\nend = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass"


class Machine:
    """A machine whose clock and CPU times the test turns: seconds of all processes and of this one."""

    def __init__(self, patch: pytest.MonkeyPatch, cores: int, own_cores: int) -> None:
        self.elapsed = self.all = self.own = 0.0
        patch.setattr(other_work.time, "monotonic", lambda: self.elapsed)
        patch.setattr(other_work, "_machine_seconds", lambda: self.all)
        patch.setattr(other_work, "_own_seconds", lambda: self.own)
        patch.setattr(other_work.os, "cpu_count", lambda: cores)
        patch.setattr(other_work, "usable_cores", lambda: own_cores)


@pytest.mark.parametrize(
    ("cores", "own_cores", "others", "taken"),
    [(2, 2, 0.4, 0.0), (2, 2, 0.6, 0.6), (64, 4, 60.5, 0.0), (64, 4, 61.5, 1.5)],
)
def test_others_may_use_the_cores_that_are_left(
    monkeypatch: pytest.MonkeyPatch, cores: int, own_cores: int, others: float, taken: float
) -> None:
    machine = Machine(monkeypatch, cores, own_cores)
    work = OtherWork()
    machine.elapsed, machine.own = 8.0, 8.0 * own_cores
    machine.all = machine.own + 8.0 * others
    assert work.cores() == pytest.approx(taken)
    # Ranks of the same run on other cores are no others.
    assert work.cores(machine.own + 8.0 * others) == 0


def others_seconds() -> float:
    return other_work._machine_seconds() - other_work._own_seconds()


def test_seconds_of_children_that_ended_are_own() -> None:
    """A child spins for one second: it counts as another process while it runs, and as own work once it has ended."""
    before = others_seconds()
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    time.sleep(0.9)
    during = others_seconds()
    child.wait()
    after = others_seconds()
    assert during - before > 0.4
    assert after - during < during - before
