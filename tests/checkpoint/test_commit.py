"""The commit protocol: order, a kill at every moment, full disks, and operation a start cleans up."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.checkpoint import commit, shards
from shardwise.checkpoint.checkpoint import latest, save_checkpoint
from shardwise.core.errors import ResourceError
from shardwise.engine.run import Run
from shardwise.engine.train_state import TrainState
from tests.harness.pool import Pool
from tests.harness.tiny_run import MODEL, equal, flip, make_run, names, saved_as, train, unexpected, whole

WEIGHTS_0 = "weights-00000.safetensors"

# ---- order and crashes ------------------------------------------------------------------------------------


def trace_a_save(folder: Path, log: Path) -> None:
    traced(make_run(), folder, [2], log)


def traced(run: Run, folder: Path, steps: list[int], log: Path, crash_at: int = 0) -> None:
    """Save, with a log of the operations on ``folder`` in ``log``; die just before file operation ``crash_at``.

    Python's audit events see every open, mkdir, rename, rmdir and unlink of any caller; fsync has none
    and is wrapped.
    """
    record = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    count = 0

    def note(operation: str, path: str) -> None:
        nonlocal count
        if str(folder) in path:
            count += 1
            if count == crash_at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(record, f"{operation} {os.path.relpath(path, folder)}\n".encode())

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_CREAT | os.O_WRONLY):
            note("create", arguments[0])
        elif event in ("os.mkdir", "os.rename", "os.rmdir"):
            path = os.fsdecode(arguments[event == "os.rename"])
            note(event[3:], os.path.join(path_of(arguments[-1]), path))
        elif event == "os.remove":
            note("unlink", os.path.join(path_of(arguments[1]), os.fsdecode(arguments[0])))

    sync = os.fsync

    def fsync(descriptor: int) -> None:
        note("fsync", path_of(descriptor))
        sync(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(audit)
    for number in steps:
        save_checkpoint(run, TrainState(number, 0), folder, 1)


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else ""


def test_files_are_synced_before_the_manifest_and_the_manifest_before_the_commit(
    pool: Pool, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    pool.run(1, saved_as, folder, [1], 1)
    pool.run(1, trace_a_save, folder, tmp_path / "log")
    operations = (tmp_path / "log").read_text().splitlines()
    staged = next(name.split()[1] for name in operations if name.startswith("mkdir tmp-2-"))
    order = [line.replace(staged, "TMP") for line in operations]
    data = [f"{part}-00000.safetensors" for part in ("weights", "optimizer")]
    retired = order.index(next(line for line in order if line.startswith("rename tmp-retired-step-1")))
    assert [line for line in order[:retired] if line != "mkdir ."] == [
        "mkdir TMP",
        *(f"{operation} TMP/{name}" for name in data for operation in ("create", "fsync")),
        "create TMP/manifest.json",
        "fsync TMP/manifest.json",
        "fsync TMP",
        "rename step-2",
        "fsync .",
    ]
    assert [line.split()[0] for line in order[retired + 1 :]] == ["unlink"] * 3 + ["rmdir"]
    assert names(folder) == ["step-2"]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """Also when the step being saved exists already, and with a single checkpoint kept."""
    (moments,) = pool.run(1, killed_everywhere, tmp_path)
    assert moments > 25


def killed_everywhere(scratch: Path) -> int:
    """Save once, then again and again in forks that die ever later; how many died before one lived."""
    run = make_run()
    save_checkpoint(run, TrainState(1, 0), scratch / "first", 1)
    dist.destroy_process_group()  # its threads would not survive a fork
    folder, log = scratch / "checkpoints", scratch / "log"
    for crash_at in itertools.count(1):
        shutil.copytree(scratch / "first", folder)
        child = os.fork()
        if child == 0:
            traced(run, folder, [2, 2], log, crash_at)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        operations = log.read_text().splitlines()
        if code == 0:
            return len(operations)
        assert (code, len(operations)) == (-signal.SIGKILL, crash_at - 1)
        commit.prepare_folder(folder)
        found = latest(folder, warn=unexpected)
        assert found is not None, operations
        assert found.name == "step-2" or "rename step-2" not in operations, operations
        assert set(names(folder)) <= {"step-1", "step-2"}, operations
        shutil.rmtree(folder)
    raise AssertionError("unreachable")


def test_a_start_sweeps_what_crashes_left_and_nothing_else(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path
    pool.run(1, saved_as, folder, [1, 2], 2)
    for name in ("tmp-3-abc", "tmp-retired-step-1-ff", "step-9", "notes"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / "tmp-file").write_text("x")
    commit.prepare_folder(folder)
    assert names(folder) == ["notes", "step-1", "step-2", "step-9"]


def test_a_start_finishes_a_commit_that_lacked_only_the_rename(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path
    pool.run(1, saved_as, folder, [1, 2], 2)
    (folder / "step-2").rename(folder / "tmp-2-00ff")
    (folder / "step-1").rename(folder / "tmp-1-00ff")
    flip(folder / "tmp-1-00ff" / WEIGHTS_0, 900)
    commit.prepare_folder(folder)
    assert names(folder) == ["step-2"]


# ---- disks ------------------------------------------------------------------------------------------------


def full_disk(folder: Path, rank: int) -> str:
    """Save while one rank may not write files of this size, then while it may."""
    run = make_run()
    train(run, range(1))
    save_checkpoint(run, TrainState(1, 0), folder, 1)
    before = whole(run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        save_checkpoint(run, TrainState(2, 0), folder, 1)
    except ResourceError as error:
        line = error.line()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert equal(before, whole(run))
    assert dist.get_rank() != 0 or names(folder) == ["step-1"]
    assert latest(folder, unexpected) == folder / "step-1"
    dist.barrier()
    save_checkpoint(run, TrainState(2, 0), folder, 1)
    return line


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_cannot_grow_is_an_error_on_every_rank_and_harms_nothing(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    for line in pool.run(2, full_disk, tmp_path, rank):
        assert line.startswith(f"error: cannot write the checkpoint ({tmp_path}): ")
        assert "KiB needed" in line
        assert "ulimit -f" in line
    assert latest(tmp_path) == tmp_path / "step-2"


def short_of_memory(folder: Path) -> tuple[str, int]:
    run = make_run()
    save_checkpoint(run, TrainState(1, 0), folder, 1)

    def found_no_room(*_: Any) -> shards.Shard:
        raise MemoryError

    if dist.get_rank() == 1:
        shards.write_shard = found_no_room
    with pytest.raises(ResourceError) as caught:
        save_checkpoint(run, TrainState(2, 0), folder, 1)
    return caught.value.line(), caught.value.exit_code


def test_memory_that_runs_out_in_a_save_is_no_damage(pool: Pool, tmp_path: Path) -> None:
    """Exit code 7 on every rank, as wherever else memory runs out, and the earlier checkpoint is intact."""
    for line, code in pool.run(2, short_of_memory, tmp_path):
        assert code == 7 and "memory ran out on rank 1: MemoryError" in line
    assert names(tmp_path) == ["step-1"]


def test_too_little_space_is_seen_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"No space left on device, .* EiB needed, .* free"):
        commit.stage(tmp_path, 1, 1 << 62)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_seen_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ResourceError, match="make the folder writable"):
        commit.prepare_folder(tmp_path / "checkpoints")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_folder_that_cannot_be_made_is_seen_at_the_start() -> None:
    with pytest.raises(ResourceError, match=r"cannot write the checkpoint \(/proc/shardwise/checkpoints\)"):
        commit.prepare_folder(Path("/proc/shardwise/checkpoints"))


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ResourceError, match="cannot write the checkpoint"):
        commit.prepare_folder(tmp_path / "checkpoints")


def needed_and_written(folder: Path, stage: int) -> tuple[int, int]:
    """Bytes that a save asks room for, and those of its files."""
    asked: list[int] = []
    make = commit.stage
    commit.stage = lambda where, step, needed: (asked.append(needed), make(where, step, needed))[1]
    try:
        path = save_checkpoint(make_run(stage, model={**MODEL, "width": 64}), TrainState(1, 0), folder, 1)
    finally:
        commit.stage = make
    return sum(asked), sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 0), (2, 3), (4, 3)])
def test_a_save_asks_for_the_bytes_that_it_writes(
    pool: Pool, tmp_path: Path, world_size: int, stage: int
) -> None:
    needed, written = pool.run(world_size, needed_and_written, tmp_path, stage)[0]
    assert 0.95 * written <= needed <= written


def test_the_names_of_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path_of(descriptor)))
    commit.prepare_folder(tmp_path / "runs" / "one" / "checkpoints")
    assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "one")} <= set(synced)
