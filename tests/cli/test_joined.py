"""``shardwise train`` as a rank of torchrun's: what comes of the processes in which it plans. No process is started."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.cli import joined
from shardwise.cli.prepare import FINISHED
from shardwise.report import run as reports
from shardwise.serve import report as samples
from shardwise.technique import strategy_from
from shardwise.train import worker
from shardwise.train.folder import PAGE
from shardwise.train.shortage import Shortage, remember

SHORT = Shortage(dict(strategy_from({"micro_batch_size": 4}).values), 2, 2, 1, 17, 1 << 30, 2 << 30)

Joined = Callable[..., int]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a report was written for."""
    written: list[Path] = []
    monkeypatch.setattr(samples, "record_sample", lambda folder: None)
    monkeypatch.setattr(reports, "write_report", written.append)
    return written


@pytest.fixture
def join(tmp_path: Path, reported: list[Path], monkeypatch: pytest.MonkeyPatch) -> Joined:
    """A rank's exit code, where planning ends with ``planned``, and putting the folder right with ``caught_up``."""

    def as_rank(rank: int, planned: int, caught_up: int = 0, short: bool = False) -> int:
        def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            code = caught_up if "--catch-up" in words else planned
            return subprocess.CompletedProcess(words, code, stdout="")

        def run_rank(verb: str, folder: Path, exact: bool, device: str, prepare: Callable[[], int]) -> None:
            # All ranks hear of what rank 0's planner said.
            code = prepare() if rank == 0 else planned
            if code != 0:
                raise worker.PlanFailed(code)
            if short:
                remember(folder, SHORT)

        monkeypatch.setattr(joined, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
        monkeypatch.setattr(worker, "run_rank", run_rank)
        return joined.train_as_rank(Path("recipe.yaml"), [], tmp_path / "run", False, rank, "cpu")

    return as_rank


def test_a_planner_that_is_killed_is_told(
    join: Joined, reported: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert join(0, -signal.SIGKILL) == 7
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith(
        "error: planning was killed (in a process of rank 0's): by "
    )
    assert "SIGKILL (the kernel does so when memory runs out)" in told
    assert join(0, 2) == 2 and join(1, 2) == 2
    assert capsys.readouterr().err == "", "it has said why"
    assert reported == []


def test_where_nothing_is_left_to_do_nobody_trains(
    join: Joined, reported: list[Path], tmp_path: Path
) -> None:
    """The folder stays as it is: no report is written again. A run that ended before its first one gets it."""
    assert join(0, FINISHED) == 0 and join(1, FINISHED) == 0
    assert reported == [tmp_path / "run"]
    (tmp_path / "run" / PAGE).touch()
    assert join(0, FINISHED) == 0 and join(1, FINISHED) == 0
    assert len(reported) == 1


@pytest.mark.parametrize(("code", "how"), [(1, "exit code 1"), (-signal.SIGKILL, "killed by SIGKILL")])
def test_a_plan_that_could_not_be_put_right_is_told(
    code: int, how: str, join: Joined, reported: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert join(0, 0, caught_up=code, short=True) == 0
    out = capsys.readouterr().out
    assert out.startswith("warning: ") and "plan.json" in out and how in out
    assert len(reported) == 1


def test_otherwise_nothing_is_told(
    join: Joined, reported: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert join(0, 0, short=True) == 0 and join(0, 0) == 0
    assert capsys.readouterr() == ("", "")
    assert len(reported) == 2
