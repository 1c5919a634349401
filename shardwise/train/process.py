"""A worker's side of the launch: joining the other ranks, and leaving them.

Started by nobody, a process is a world of one, through the same code: its store is in memory and its group on
loopback. Under our launcher, and whenever a job has one machine, nothing listens beyond loopback. Across
machines torch's own rendezvous is used, which listens on all interfaces and authenticates nobody: a
cluster's network is trusted, as every trainer does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug

from shardwise.core.allocator_options import DEFAULTS, unset
from shardwise.core.errors import RankError, ResourceError
from shardwise.train.placement import LOOPBACK, STORE_SOCKET, Placement, launched_by

TIMEOUT = timedelta(minutes=30)
"""How long a collective, or the first meeting of the ranks, may take."""

_ALONE = Placement("", rank=0, world_size=1, local_rank=0, nodes=1, host="", port=0)


@dataclass(frozen=True)
class World:
    """Where this process stands among its peers, and the device that is its own."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


@contextlib.contextmanager
def join(device_type: str | None = None) -> Iterator[World]:
    """Meet the other ranks: within the block there is a default process group, nccl on CUDA, gloo on the CPU.

    ``device_type`` is "cuda" or "cpu"; None takes CUDA where there is any. The ranks leave together when
    the block ends well; when it does not, this rank leaves at once, and the others see a broken connection.
    Raises ResourceError without a device for this rank, RankError when the ranks do not meet, RecipeError for
    an environment that contradicts itself.
    """
    placement = launched_by() or _ALONE
    device = _device(placement.local_rank, device_type)
    if placement.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    try:
        _meet(_store(placement), placement.rank, placement.world_size, device)
    except RuntimeError as error:  # of which DistNetworkError, DistStoreError are kinds
        raise RankError(
            f"rank {placement.rank} of {placement.world_size} did not meet the others",
            where=f"{placement.host}:{placement.port}",
            why=str(error).splitlines()[0],
        ) from error
    yield World(placement.rank, placement.world_size, placement.local_rank, device)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


def meet_again(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """Leave all process groups, whatever became of them, and make a new default one with the same ranks.

    ``store`` is one that has not been used for this before. Raises RankError when the ranks do not meet.
    """
    if dist.is_initialized():
        c10d._abort_process_group()
    _forget_meshes()
    gc.collect()
    try:
        _meet(store, rank, world_size, device)
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} of {world_size} did not meet the others again",
            where="",
            why=str(error).splitlines()[0],
        ) from error


def _forget_meshes() -> None:
    """Have nothing lead to groups that are gone.

    Meshes outlive their runs in DTensor's caches. They hold their groups, and a mesh of the same shape that is made
    later is taken for them.
    """
    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # not in every version of torch
    if clear is not None:
        clear()
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper:
            if (each.__module__ or "").startswith("torch.distributed.tensor"):
                each.cache_clear()
        elif type(each) is DeviceMesh:
            getattr(each, "_pg_registry", {}).clear()


def _meet(store: Store | None, rank: int, world_size: int, device: torch.device) -> None:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )


def _device(local_rank: int, device_type: str | None) -> torch.device:
    if (device_type or ("cuda" if torch.cuda.is_available() else "cpu")) != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ResourceError(
            f"there is no GPU for local rank {local_rank}",
            where=socket.gethostname(),
            why=f"{count} visible",
            fix="lower cluster.devices_per_node, or check CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    settings = DEFAULTS.get("rocm" if torch.version.hip else "cuda")
    if settings is not None and unset():  # as the plan assumes
        torch._C._accelerator_setAllocatorSettings(settings)
    return device


def _store(placement: Placement) -> Store | None:
    """Where the ranks find each other; None leaves it to torch and the environment."""
    if placement == _ALONE:
        return HashStore()
    if placement.by == "torchrun":
        return None
    listening = None
    if placement.rank == 0 and STORE_SOCKET in os.environ:
        listening = int(os.environ.pop(STORE_SOCKET))
    elif placement.rank == 0 and placement.nodes == 1:
        listening = socket.create_server((placement.host, placement.port)).detach()
    return TCPStore(
        placement.host,
        placement.port,
        placement.world_size,
        is_master=placement.rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
