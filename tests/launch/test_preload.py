"""Workers that were started before their command is known."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from shardwise.launch import launcher, preload
from shardwise.launch.launcher import run_ranks


def started() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if preload.WAIT in child.cmdline()]


def wait_for(gone: psutil.Process) -> None:
    gone.wait(timeout=5.0)


@pytest.mark.cli
def test_a_started_worker_takes_the_command(tmp_path: Path) -> None:
    """It runs with the command's arguments and log, in its own process."""
    with launcher.preloaded_run(1):
        [child] = started()
        code, line = run_ranks(1, ["train", str(tmp_path / "nothing")], tmp_path / "logs")
        assert not child.is_running()
    assert code == 2 and str(tmp_path / "nothing") in line
    assert "Traceback" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_workers_without_a_command_end_with_the_block() -> None:
    with launcher.preloaded_run(2):
        children = started()
        assert len(children) == 2
    for child in children:
        wait_for(child)
    assert not started()


def test_other_variables_need_another_process(tmp_path: Path) -> None:
    """Threads of OpenMP are counted when a process starts."""
    with preload.preloaded_workers(1, {"OMP_NUM_THREADS": "1"}):
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        assert preload.take(launcher.Command((), environment, 1, 2, ())) is None
        assert len(started()) == 1


def test_a_worker_that_ended_takes_nothing(tmp_path: Path) -> None:
    with preload.preloaded_workers(1, {}):
        [child] = started()
        child.kill()
        deadline = time.monotonic() + 5.0
        while child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert preload.take(launcher.Command((), {}, 1, 2, ())) is None
