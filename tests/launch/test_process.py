"""Joining the other ranks: under our launcher, torchrun's environment, srun's, or alone."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.core.errors import RankError, RecipeError, ResourceError
from shardwise.launch import launcher as launching
from shardwise.launch import process
from shardwise.launch.launcher import run_ranks
from shardwise.launch.placement import LAUNCHER, LOOPBACK_INTERFACE, first_host, launched_by
from shardwise.launch.process import VISIBLE_DEVICES, World, join
from shardwise.launch.signals import StopRequest
from tests.harness.pool import Pool

# ---- the environment --------------------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456",
}  # fmt: skip


def test_who_started_this_process() -> None:
    assert launched_by({}) is None
    assert launched_by({"PATH": "/bin"}) is None
    found = launched_by(TORCHRUN)
    assert found is not None
    assert (found.by, found.rank, found.world_size, found.local_rank) == ("torchrun", 5, 8, 1)
    assert (found.nodes, found.host, found.port) == (2, "node1", 29500)
    found = launched_by(SRUN)
    assert found is not None
    assert (found.by, found.rank, found.world_size, found.local_rank) == ("srun", 3, 4, 1)
    assert (found.nodes, found.host, found.port) == (2, "gpu07", 23456)
    ours = launched_by(TORCHRUN | {"SHARDWISE_LAUNCHER": "1"})
    assert ours is not None
    assert ours.by == "shardwise"


def test_a_batch_script_and_a_step_of_one_task_are_not_ranks() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu1"}
    assert launched_by(batch) is None
    assert launched_by(SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_a_step_on_one_machine_stays_on_loopback() -> None:
    found = launched_by(SRUN | {"SLURM_STEP_NUM_NODES": "1"})
    assert found is not None
    assert found.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
    ],
)
def test_an_environment_that_contradicts_itself(changes: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        launched_by(TORCHRUN | changes)
    assert caught.value.line().startswith("error: ")


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]-node", "rack1-node"),
        ("a-b-001.example.org", "a-b-001.example.org"),
    ],
)
def test_first_host(nodelist: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert first_host(nodelist) == host


# ---- joining ----------------------------------------------------------------------------------------------


def joined(starter: str) -> tuple[int, int, float, set[str]]:
    """Join as a rank of ``starter``: rank, world size, a sum over ranks, the addresses it listens on."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ports = [free_port()]
    dist.broadcast_object_list(ports)
    dist.barrier()
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME")
    before = listeners()
    os.environ.update(environment_of(starter, rank, world_size, ports[0]))
    with join() as world:
        mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("shard",))
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total, group=mesh.get_group("shard"))
        listening = {ip for ip, _ in listeners() - before}
    assert not dist.is_initialized()
    assert world == World(rank, world_size, rank, torch.device("cpu"))
    return world.rank, world.world_size, float(total), listening


def environment_of(starter: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    common = {"MASTER_PORT": str(port)}
    if starter == "srun":
        return common | {
            "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(world_size), "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7",
        }  # fmt: skip
    return common | {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def listeners() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_srun_on_one_machine_listens_on_loopback_only(pool: Pool) -> None:
    for rank, (mine, world_size, total, listening) in enumerate(pool.run(3, joined, "srun")):
        assert (mine, world_size, total) == (rank, 3, 6.0)
        assert listening == {"127.0.0.1"}


def test_torchruns_environment(pool: Pool) -> None:
    for rank, (mine, world_size, total, _) in enumerate(pool.run(2, joined, "torchrun")):
        assert (mine, world_size, total) == (rank, 2, 3.0)


def alone() -> tuple[World, set[str]]:
    dist.destroy_process_group()
    before = listeners()
    with join() as world:
        dist.all_reduce(torch.ones(1))
        return world, {ip for ip, _ in listeners() - before}


def test_a_process_that_nobody_launched_is_a_world_of_one(pool: Pool) -> None:
    ((world, listening),) = pool.run(1, alone)
    assert world == World(0, 1, 0, torch.device("cpu"))
    assert listening <= {"127.0.0.1"}


def never_met() -> str:
    dist.destroy_process_group()
    process.TIMEOUT /= 1800  # a second
    os.environ.update(environment_of("srun", 1, 2, free_port()))
    with pytest.raises(RankError) as caught, join():
        pass
    return caught.value.line()


def on_a_used_port(starter: str) -> str:
    dist.destroy_process_group()
    with socket.create_server(("127.0.0.1", 0)) as used:
        os.environ.update(environment_of(starter, 0, 2, used.getsockname()[1]))
        with pytest.raises(ResourceError) as caught, join():
            pass
        return caught.value.line()


@pytest.mark.parametrize("starter", ["srun", "torchrun"])
def test_a_port_that_is_in_use_is_named(pool: Pool, starter: str) -> None:
    (line,) = pool.run(1, on_a_used_port, starter)
    assert re.match(r"error: port (\d+) is in use \(127\.0\.0\.1:\1\): .*set MASTER_PORT", line), line


def test_ranks_that_do_not_meet(pool: Pool) -> None:
    (line,) = pool.run(1, never_met)
    assert line.startswith("error: rank 1 of 2 did not meet the others (127.0.0.1:")


def late(host: str, local_rank: int) -> str:
    dist.destroy_process_group()
    process.TIMEOUT /= 1800  # a second
    process.LATE_SECONDS = 0.2
    own = {"MASTER_ADDR": host, "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": str(local_rank)}
    os.environ.update(environment_of("srun", 1, 2, free_port()) | own)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(RankError), join():
        pass
    return said.getvalue()


@pytest.mark.parametrize(
    ("host", "missing"),
    [
        ("127.0.0.1", "the other ranks"),
        ("nowhere.invalid", "an address of nowhere.invalid, which this machine does not know"),
    ],
)
def test_a_rank_that_waits_says_where_and_for_what(pool: Pool, host: str, missing: str) -> None:
    (line,) = pool.run(1, late, host, 0)
    assert re.fullmatch(rf"rank 1 of 2 on \S+ waits at {host}:\d+ for {missing}, \d+ min at most\n", line), (
        line
    )


def test_one_rank_of_a_machine_says_it(pool: Pool) -> None:
    assert pool.run(1, late, "127.0.0.1", 1) == [""]


def test_no_gpu_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(ResourceError, match=r"no GPU for local rank 1 .*: 1 visible"),
        join_as(1, monkeypatch),
    ):
        pass


@pytest.mark.parametrize("variable", VISIBLE_DEVICES)
@pytest.mark.parametrize(
    ("starter", "count", "local_rank", "own", "chosen"),
    [
        ("srun", 1, 3, False, 0),  # --gpus-per-task=1 in a cgroup: every task sees its GPU as the only one
        ("srun", 1, 3, True, 0),
        ("srun", 4, 3, False, 3),  # --gpus-per-node=4
        ("torchrun", 1, 3, True, 0),  # a wrapper sets the variable for each process
        ("torchrun", 4, 3, True, 3),
        ("srun", 2, 5, True, None),
        ("torchrun", 1, 1, False, None),
        ("shardwise", 1, 1, True, None),  # its processes share the environment of the launcher
        ("srun", 0, 0, True, None),
    ],
)
def test_the_gpu_of_a_local_rank(
    starter: str,
    count: int,
    local_rank: int,
    own: bool,
    chosen: int | None,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs are numbered as the process sees them."""
    selected = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(process, "set_allocator", lambda settings: None)
    monkeypatch.setattr(process, "_meet", lambda *arguments: None)
    monkeypatch.setattr(process, "_store", lambda placement: None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, LOOPBACK_INTERFACE)
    for name in VISIBLE_DEVICES:
        monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(variable, str(local_rank))
    if starter == "shardwise":
        monkeypatch.setenv(LAUNCHER, "1")
    entered = join_as(local_rank, monkeypatch, "torchrun" if starter == "shardwise" else starter)
    if chosen is None:
        with pytest.raises(ResourceError, match=f"no GPU for local rank {local_rank} .*: {count} visible"):
            entered.__enter__()
        return
    world = entered.__enter__()
    assert world.device == torch.device("cuda", chosen) and selected == [world.device]
    entered.gen.close()  # the rank leaves at once, as after an exception


def join_as(local_rank: int, monkeypatch: pytest.MonkeyPatch, starter: str = "torchrun") -> Any:
    for name, value in environment_of(starter, local_rank, max(2, local_rank + 1), free_port()).items():
        monkeypatch.setenv(name, value)
    return join("cuda")


# ---- the whole way ----------------------------------------------------------------------------------------

WORKER = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from shardwise.launch.process import join
import psutil

with join() as world:
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    connections = psutil.Process().net_connections("inet")
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    Path(sys.argv[1], f"seen-{world.rank}").write_text(f"{int(total)} {sorted(listening)}")
    if world.rank == 1:
        raise ValueError("boom")
    dist.barrier()
"""


def test_launched_ranks_meet_on_loopback_and_a_failure_is_pinned_on_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "meeting_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    monkeypatch.setattr(launching, "WORKER", "meeting_worker")
    code, line = run_ranks(2, [str(tmp_path)], tmp_path / "logs")
    assert code == 5
    for rank in (0, 1):
        assert (tmp_path / f"seen-{rank}").read_text() == "3 ['127.0.0.1']"
    assert capfd.readouterr() == ("", ""), "the caller prints the line"
    assert line.startswith("error: rank 1 was lost")
    assert "ValueError: boom" in line


def asked_by(number: int) -> float:
    stopping = StopRequest(torch.device("cpu"))
    before = float(stopping.agreed(False)[0])
    os.kill(os.getpid(), number)
    flags = stopping.agreed(dist.get_rank() == 0)
    assert flags[1] == 1, "what one rank asks for, all ranks agree on"
    return float(flags[0]) - before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_that_is_signalled_asks_all_to_stop(pool: Pool, number: signal.Signals) -> None:
    assert pool.run(1, asked_by, int(number)) == [1.0]
