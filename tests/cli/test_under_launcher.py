"""``shardwise train`` as a rank of torchrun's: what comes of the processes in which it plans. No process is started."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise import worker
from shardwise.checkpoint.run_folder import PAGE, RECIPE, claim
from shardwise.cli import train
from shardwise.cli import under_launcher as joined
from shardwise.cli.planner import FINISHED
from shardwise.core.attempts import ATTEMPTS, Attempts, interruptions
from shardwise.core.errors import DataError, RecipeError
from shardwise.launch import first_failure
from shardwise.launch.process import World
from shardwise.plugins.serve import samples
from shardwise.report import run as reports
from shardwise.technique import strategy_from
from shardwise.trainer.faults.oom_record import OomRecord, write_record

RECORD = OomRecord(dict(strategy_from({"micro_batch_size": 4}).values), 2, 2, 1, 17, 1 << 30, 2 << 30)

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
    """Returns a rank's exit code: planning ends with ``planned``, and training with ``error`` and ``record``."""

    def as_rank(
        rank: int, planned: int, error: Exception | None = None, record: OomRecord | None = None
    ) -> int:
        def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            assert options["preexec_fn"] or sys.platform != "linux", "it must not outlive the rank"
            return subprocess.CompletedProcess(words, planned, stdout="error: advice")

        def run_rank(verb: str, folder: Path, exact: bool, device: str, prepare: Callable[[], int]) -> None:
            code = prepare()
            # All ranks report the error of rank 0's planner.
            code = code if rank == 0 else planned
            if code != 0:
                raise worker.PlanFailed(code)
            if record is not None:
                write_record(folder, record)
            if error is not None:
                raise error

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
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECIPE).touch()
    assert join(0, FINISHED) == 0 and join(1, FINISHED) == 0
    assert reported == [tmp_path / "run"]
    (tmp_path / "run" / PAGE).touch()
    assert join(0, FINISHED) == 0 and join(1, FINISHED) == 0
    assert len(reported) == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [RECORD.error(), RuntimeError("Connection closed by peer")])
def test_all_ranks_ask_for_a_restart_after_an_oom(
    error: Exception, rank: int, join: Joined, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those whose collectives broke. A micro-batch of 1 is final; rank 0 then names the plan that fits."""
    (tmp_path / "run").mkdir()
    assert join(rank, 0, error, RECORD) == 75
    assert "advice" not in capsys.readouterr().err
    assert join(rank, 0, error, replace(RECORD, next_micro_batch_size=0)) == 7
    assert capsys.readouterr().err.endswith("error: advice\n") == (rank == 0)


def test_an_error_without_an_oom_is_the_ranks(
    join: Joined, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    write_record(tmp_path / "run", RECORD)  # of an earlier start
    assert join(1, 0, RuntimeError("Connection closed by peer\nsecond line")) == 5
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: rank 1 on {socket.gethostname()} failed (")
    assert ": RuntimeError: Connection closed by peer; another rank was lost first" in line


def test_a_run_that_ends_well_prints_nothing(
    join: Joined, reported: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert join(0, 0) == 0
    assert capsys.readouterr() == ("", "")
    assert len(reported) == 1


@pytest.mark.parametrize(("started", "said"), [(1, "the only one"), (3, "one of 3")])
def test_another_number_of_processes_than_the_recipes_is_refused(
    started: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written; and not with 5, after which schedulers start a job again."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{model: {preset: tiny}, steps: 1, batch_size: 4, cluster: {devices_per_node: 2}}")
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(RecipeError, match=rf"the plan is for 2 processes .*this is {said}"):
        train.command(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_ranks_look_at_the_folder_after_the_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS would remember for half a minute that the folder is absent, which rank 0 then makes."""

    def never(folder: Path) -> int:
        raise AssertionError("looked at before the rendezvous")

    def run_rank(*arguments: Any) -> None:
        raise RuntimeError("no rendezvous")

    monkeypatch.setattr(joined, "written_at", never)
    monkeypatch.setattr(worker, "run_rank", run_rank)
    assert joined.train_as_rank(Path("recipe.yaml"), [], tmp_path / "run", False, 1, "cpu") == 5


@pytest.mark.parametrize(
    ("holder", "versions", "why"),
    [
        (None, None, None),
        ("", None, "node1 does not see what HOST wrote there"),
        ("process 7 on node9", None, "node1 does not see what HOST wrote there"),  # of an earlier run
        (None, "shardwise 9, torch 9", "torch .* on HOST, shardwise 9, torch 9 on node1"),
    ],
)
def test_nodes_that_differ_are_refused_on_all_ranks(
    holder: str | None,
    versions: str | None,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder of its own, perhaps with the job of an earlier run, or other versions. Nothing is planned or written."""
    out, prepared = tmp_path / "run", SimpleNamespace(times=0)

    def prepare() -> int:
        prepared.times += 1
        return 0

    def gather(seen: list[tuple[str, str, str]], own: tuple[str, str, str]) -> None:
        seen[1] = ("node1", own[1] if holder is None else holder, versions or own[2])

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda codes: None)
    world = World(0, 2, 0, torch.device("cpu"))
    with claim(out):
        if why is None:
            assert worker._prepared_on_rank_0(prepare, out, world) == 0
            return
        with pytest.raises(RecipeError, match=why.replace("HOST", socket.gethostname())):
            worker._prepared_on_rank_0(prepare, out, world)
    assert prepared.times == 0 and not out.exists()


def test_a_rank_that_fails_alone_ends_all_with_its_code(
    join: Joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its peers only see a broken connection, whose code would let a scheduler start the run again."""
    (tmp_path / "run").mkdir()
    store = HashStore()
    monkeypatch.setattr(first_failure, "default_store", lambda: store)
    broken = RuntimeError("Connection closed by peer")
    assert join(2, 0, broken) == 5, "no rank has told why"
    assert join(1, 0, DataError("no such data source", where="a.jsonl")) == 3
    capsys.readouterr()
    assert join(0, 0, broken) == 3
    line = f"error: rank 1 on {socket.gethostname()} failed: no such data source (a.jsonl)\n"
    assert capsys.readouterr().err == line


def test_the_page_gets_the_interruptions_of_a_run_under_torchrun(join: Joined, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert join(0, 2) == 2, "nothing began"
    assert not (out / ATTEMPTS).exists()
    out.mkdir(exist_ok=True)
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    assert join(0, 0, DataError("no such data source")) == 3
    Attempts(out).began()
    Attempts(out).training(0)
    assert [found.cause for found in interruptions(out)] == ["error: no such data source"]


def test_a_command_that_no_launcher_started_refuses_several_nodes(tmp_path: Path) -> None:
    """It would start the ranks of all nodes on this one, and the same command on the next node as well."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{model: {preset: tiny}, steps: 1, batch_size: 16, cluster: {preset: 2x8xH100-80GB}}")
    with pytest.raises(RecipeError, match=r"the cluster has 2 nodes, .* torchrun or srun"):
        train.command(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
