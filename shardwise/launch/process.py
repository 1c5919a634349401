"""How a worker joins the process group, and leaves it.

A process without a launcher is a world of one rank, with the same code: its store is in memory. A job on one machine
listens on loopback only. A job on several machines uses torch's rendezvous, which listens on all interfaces without
authentication; like other trainers, it trusts the cluster's network.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwise.core.errors import RankError, ResourceError
from shardwise.hardware.allocator_options import unset
from shardwise.hardware.kinds import HOST, accelerator_here, kind_of
from shardwise.launch.attempt import attempt_store
from shardwise.launch.placement import LOOPBACK_INTERFACE, STORE_SOCKET, Placement, launched_by
from shardwise.runtime.torch_private import set_allocator

TIMEOUT = timedelta(minutes=30)
"""How long a collective, or the rendezvous, may take."""

LATE_SECONDS = 15.0
"""After which a rank that waits for the others says so."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set to "True" by torchrun where its agent has the store at MASTER_ADDR and MASTER_PORT."""

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that limit the GPUs that a process sees."""

_ALONE = Placement("", rank=0, world_size=1, local_rank=0, nodes=1, host="", port=0)


@dataclass(frozen=True)
class World:
    """This process's rank, and its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


@contextlib.contextmanager
def join(device_type: str | None = None) -> Iterator[World]:
    """Initialise the default process group for the block: NCCL on CUDA, gloo on the CPU.

    After a successful block the ranks leave together. After an exception this rank leaves at once, and its peers see a
    broken connection.

    Args:
        device_type: "cuda" or "cpu"; None takes CUDA if it is available.

    Raises:
        ResourceError: this rank has no device, or the port of rank 0's store is in use.
        RankError: the rendezvous failed.
        RecipeError: the environment contradicts itself.
    """
    placement = launched_by() or _ALONE
    device = _device(placement.local_rank, device_type, _share_devices(placement))
    if placement.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    try:
        with _said_when_late(placement):
            _meet(_store(placement), placement.rank, placement.world_size, device)
    except (OSError, RuntimeError) as error:  # the base class of DistNetworkError and DistStoreError
        raise _failed_rendezvous(placement, error) from error
    yield World(placement.rank, placement.world_size, placement.local_rank, device)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


@contextlib.contextmanager
def _said_when_late(placement: Placement) -> Iterator[None]:
    """Say once on each machine, after LATE_SECONDS in the block, that the other ranks are not there yet."""
    late = threading.Timer(LATE_SECONDS, _say_late, [placement])
    late.daemon = True
    if placement.local_rank == 0:
        late.start()
    try:
        yield
    finally:
        late.cancel()


def _say_late(placement: Placement) -> None:
    try:
        socket.getaddrinfo(placement.host, placement.port)
        missing = "the other ranks"
    except OSError:
        missing = f"an address of {placement.host}, which this machine does not know"
    rank = f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}"
    where = f"{placement.host}:{placement.port}"
    most = int(TIMEOUT.total_seconds() // 60)
    print(f"{rank} waits at {where} for {missing}, {most} min at most", file=sys.stderr, flush=True)


def _failed_rendezvous(placement: Placement, error: Exception) -> ResourceError | RankError:
    where = f"{placement.host}:{placement.port}"
    why = str(error).splitlines()[0]
    if getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in why:
        return ResourceError(
            f"port {placement.port} is in use",
            where=where,
            why="rank 0 could not listen for the others",
            fix="set MASTER_PORT to a free port",
        )
    return RankError(
        f"rank {placement.rank} of {placement.world_size} did not meet the others", where=where, why=why
    )


def _meet(store: Store | None, rank: int, world_size: int, device: torch.device) -> None:
    dist.init_process_group(
        kind_of(device).collectives,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=None if kind_of(device).is_host else device,
    )


def _share_devices(placement: Placement) -> bool:
    """Whether all processes of a machine see the same GPUs, and each takes that of its local rank.

    Slurm (``--gpus-per-task``), and wrappers that set a variable for each process, show every process its own.
    """
    chosen = any(os.environ.get(name) for name in VISIBLE_DEVICES)
    return placement.by == "shardwise" or (placement.by == "torchrun" and not chosen)


def _device(local_rank: int, device_type: str | None, shared: bool = False) -> torch.device:
    """The GPU of a local rank, or the only one that this process sees unless it is ``shared``; else the CPU."""
    if (device_type or accelerator_here().torch_type) == HOST.torch_type:
        return torch.device(HOST.torch_type)
    count = torch.cuda.device_count()
    if local_rank >= count and (shared or count != 1):
        raise ResourceError(
            f"there is no GPU for local rank {local_rank}",
            where=socket.gethostname(),
            why=f"{count} visible",
            fix="lower cluster.devices_per_node, or check CUDA_VISIBLE_DEVICES"
            if count
            else "set cluster.device: cpu",
        )
    device = torch.device("cuda", min(local_rank, count - 1))
    torch.cuda.set_device(device)
    settings = kind_of(device).allocator
    if settings and unset():  # the plan assumes these
        set_allocator(settings)
    return device


def _store(placement: Placement) -> Store | None:
    """The store for the rendezvous; None leaves it to torch and the environment."""
    if placement == _ALONE:
        return HashStore()
    if placement.by == "torchrun":
        return _store_of_agent(placement) if os.environ.get(AGENT_STORE) == "True" else None
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


def _store_of_agent(placement: Placement) -> Store:
    store = TCPStore(placement.host, placement.port, placement.world_size, is_master=False, timeout=TIMEOUT)
    return attempt_store(store, placement.rank, placement.world_size, TIMEOUT)
