"""Times of collectives by the bytes of their payload, on all ranks of the default group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.core.units import MiB
from shardwise.hardware.measured import Curve


def collective_curves(payloads: Sequence[int]) -> dict[str, Curve]:
    """Median seconds by kind and bytes of the payload, of gloo on CPU tensors. Raises RuntimeError if gloo fails."""
    size = dist.get_world_size()
    rank = dist.get_rank()
    curves: dict[str, list[tuple[float, float]]] = {}
    for payload in payloads:
        # fp32. The payload is that of the whole tensor, of which each rank has a part.
        part = torch.ones(max(1, payload // 4 // size))
        whole = torch.ones(part.numel() * size)
        other = torch.empty_like(whole)
        # Defaults bind the tensors of this payload to the functions.
        kinds: dict[str, Callable[[], object]] = {
            "all_gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),  # type: ignore[misc]
            "reduce_scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),  # type: ignore[misc]
            "all_reduce": lambda w=whole: dist.all_reduce(w),  # type: ignore[misc]
            "broadcast": lambda w=whole: dist.broadcast(w, 0),  # type: ignore[misc]
            "all_to_all": lambda w=whole, o=other: dist.all_to_all_single(o, w),  # type: ignore[misc]
            "send": lambda w=whole, o=other: _to_next(w, o, rank, size),  # type: ignore[misc]
        }
        for kind, call in kinds.items():
            calls = 5 if payload > MiB else 15
            curves.setdefault(kind, []).append((float(whole.nbytes), _together(call, calls)))
    return {kind: tuple(points) for kind, points in curves.items()}


def _to_next(sent: torch.Tensor, received: torch.Tensor, rank: int, size: int) -> None:
    """One step of a ring."""
    # Both are posted before either is waited for: ranks that all wait for their sends would wait for each other.
    works = [dist.isend(sent, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        if work is not None:
            work.wait()


def _together(call: Callable[[], object], calls: int) -> float:
    """Median seconds of calls that follow each other on all ranks."""
    spent = []
    call()  # the first one sets up buffers and connections
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)
