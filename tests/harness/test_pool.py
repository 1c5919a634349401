"""The pool: fresh ranks per run, errors that name the right rank, and nothing left running."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise.core.errors import CheckpointError
from tests.harness.pool import LostRank, Pool

_state: list[int] = []


@dataclass
class Shipped:
    """Defined in the test file: its pickles must resolve in the workers too."""

    value: int


def total(start: Shipped) -> tuple[Shipped, int, int]:
    tensor = torch.tensor(start.value + dist.get_rank())
    dist.all_reduce(tensor)
    return Shipped(int(tensor)), dist.get_world_size(), torch.get_num_threads()


def remember(value: int) -> list[int]:
    _state.append(value)
    return _state


def sharded_step() -> float:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    fully_shard(model)
    model(torch.ones(2, 6)).sum().backward()
    assert isinstance(model.weight.grad, DTensor)
    return float(model.weight.grad.full_tensor().sum())


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise CheckpointError("no such thing", where="here", fix="make one")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int, folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_group_of_the_size_asked_for(pool: Pool, world_size: int) -> None:
    expected = 10 * world_size + world_size * (world_size - 1) // 2
    assert pool.run(world_size, total, Shipped(10)) == [(Shipped(expected), world_size, 1)] * world_size


def test_no_state_is_left_between_runs(pool: Pool) -> None:
    assert pool.run(2, remember, 1) == [[1], [1]]
    assert pool.run(2, remember, 2) == [[2], [2]]


def test_sharded_training_works_in_the_ranks(pool: Pool) -> None:
    assert pool.run(2, sharded_step) == [2.0 * 6 * 5 * 1] * 2


def test_an_exception_keeps_its_type_and_names_its_rank(pool: Pool) -> None:
    with pytest.raises(CheckpointError, match=r"no such thing \(here\): make one") as caught:
        pool.run(3, fail_on, 1)
    assert "on rank 1:" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0]
    assert pool.run(3, total, Shipped(0))[0][0] == Shipped(3)


def test_a_killed_rank_is_named(pool: Pool) -> None:
    with pytest.raises(LostRank, match="rank 2 died"):
        pool.run(3, die_on, 2)
    assert pool.run(3, total, Shipped(0))[0][0] == Shipped(3)


def test_a_hung_rank_times_out_and_all_are_killed(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="did not finish in 3 s"):
        pool.run(2, hang_on, 1, tmp_path, timeout=3.0)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_ranks_see_the_test_environment(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_POOL_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    assert pool.run(1, surroundings) == [("yes", str(tmp_path))]


def surroundings() -> tuple[str | None, str]:
    return os.environ.get("SHARDWISE_POOL_TEST"), os.getcwd()


def test_only_module_level_functions_and_fitting_worlds(pool: Pool) -> None:
    with pytest.raises(ValueError, match="not a module-level function"):
        pool.run(1, lambda: 1)
    with pytest.raises(ValueError, match=r"not within 1\.\.8"):
        pool.run(9, surroundings)
