"""One process of a calibration: ``python -m shardwise.plugins.calibration.rank RANK SIZE FOLDER``.

All ranks measure the same at the same time, so each has its share of the machine. Rank 0 writes the tables. An
accelerator is measured by one process: its kernels, and the host that launches them. Collectives are those of its
profile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.json_file import read_json, text_of
from shardwise.hardware.kinds import kind_of
from shardwise.hardware.measured import Grid, MeasuredSpeeds
from shardwise.plugins.calibration.attention_order import fastest_backends
from shardwise.plugins.calibration.collectives import collective_curves
from shardwise.plugins.calibration.kernels import attention, has_native_products, plain_curves, products
from shardwise.plugins.calibration.steps import (
    TimedStep,
    around_collectives,
    host_seconds,
    launch_seconds,
    ratios,
    timed_step,
)
from shardwise.plugins.calibration.task import FOUND, TASK, TINY, WIDE, Task
from shardwise.runtime.attention.steering import prefer_backends
from shardwise.trainer.meter import return_large_frees

_WHOLE = "world"
"""Stands for the number of ranks."""
SETTINGS_OF_AXIS: dict[str, dict[str, Any]] = {
    "replicate": {"zero_stage": 0},
    "shard": {"zero_stage": 3},
    "tensor": {"tensor_parallel": _WHOLE},
    "sequence": {"sequence_parallel": _WHOLE},
}
"""Settings that give all ranks to a mesh axis."""


def kernel_speeds(task: Task, device: torch.device) -> MeasuredSpeeds:
    """The speeds of this process's kernels while all ranks are busy, and of the host where ``known`` lacks it."""
    world = dist.get_world_size()
    effort = task.effort
    host = kind_of(device).is_host
    order: tuple[str, ...] = ()
    if not host:
        # Before anything else is measured: attention and steps below run the backend that plans will run.
        order = fastest_backends(device)
        prefer_backends(device, order)
    speeds = MeasuredSpeeds(
        world, torch.get_num_threads(), {}, {}, plain_curves(device, effort.largest_bytes)
    )
    native_dtypes = [dtype for dtype in task.dtypes if dtype == "fp32" or has_native_products(dtype, device)]
    grids: dict[str, Grid] = {}
    heads: dict[str, Grid] = {}
    for dtype in native_dtypes:
        dist.barrier()  # so that all ranks use the memory and the cores at the same time
        grids[dtype] = products(dtype, device, effort.product_seconds)
        heads |= attention(dtype, device, effort.attention[device.type])
    speeds = replace(speeds, products=grids, attention=heads)
    if not host:
        # Mixed precision casts and gathers weights around every block, which only the host notices.
        precision = "bf16" if "bf16" in native_dtypes else "fp32"
        step = timed_step(TINY, 64, 2, {"precision": precision}, device, effort.plain_steps)
        return replace(speeds, host=launch_seconds(step), attention_order=order)
    speeds = replace(speeds, ratios=ratios(_steps(task, device, native_dtypes), speeds.plain))
    if task.known is not None:
        return replace(speeds, host=task.known.host)
    return replace(speeds, host=host_seconds(timed_step(TINY, 64, 2, {}, device, effort.plain_steps), speeds))


def _steps(task: Task, device: torch.device, dtypes: list[str]) -> list[TimedStep]:
    """Steps of every model in fp32, and of one in bf16; with several ranks, also of one that shards its weights."""
    effort = task.effort
    steps = [timed_step(*model, {"precision": "fp32", "zero_stage": 0}, device) for model in effort.models]
    if effort.again is not None and "bf16" in dtypes:
        steps.append(timed_step(*effort.again, {"precision": "bf16", "zero_stage": 0}, device))
    if effort.again is not None and dist.get_world_size() > 1:
        steps.append(timed_step(*effort.again, {"precision": "fp32", "zero_stage": 3}, device))
    return steps


def with_collectives(speeds: MeasuredSpeeds, task: Task, device: torch.device) -> MeasuredSpeeds:
    """``speeds`` with the curves of collectives, and the host's seconds around them by mesh axis."""
    effort = task.effort
    world = dist.get_world_size()
    speeds = replace(speeds, processes=world, collectives=collective_curves(effort.payloads))
    around: dict[str, float] = {}
    waiting: dict[str, float] = {}
    for axis in effort.axes:
        settings = {key: world if value == _WHOLE else value for key, value in SETTINGS_OF_AXIS[axis].items()}
        small, large = (
            timed_step(model, 64, 2, settings, device, effort.plain_steps) for model in (TINY, WIDE)
        )
        # Operations that only this axis runs get their ratios here; those that are known keep theirs.
        speeds = replace(speeds, ratios={**ratios([small, large], speeds.plain), **speeds.ratios})
        around[axis], waiting[axis] = around_collectives(small, large, speeds, axis)
    for axis in SETTINGS_OF_AXIS:
        around.setdefault(axis, around[effort.axes[0]])
        waiting.setdefault(axis, waiting[effort.axes[0]])
    return replace(speeds, around=around, waiting=waiting)


def measured(task: Task, rank: int, size: int, folder: Path) -> MeasuredSpeeds:
    """The speeds of this process. A quick task measures kernels and host in a group of its own, next to the others."""
    device = torch.device(task.device)
    apart = task.quick and size > 1
    if apart:
        # A file of its own: ranks of two groups that meet at one file would join each other.
        kernel_group = _calibration_group(device, folder / f"store-{rank}", 0, 1)
    else:
        kernel_group = _calibration_group(device, folder / "store", rank, size)
    with kernel_group:
        speeds = kernel_speeds(task, device) if task.dtypes else task.known
        assert speeds is not None
        if size > 1 and not apart:
            speeds = with_collectives(speeds, task, device)
    if apart:
        with _calibration_group(device, folder / "store", rank, size):
            speeds = with_collectives(speeds, task, device)
    return replace(speeds, threads=torch.get_num_threads())


@contextmanager
def _calibration_group(device: torch.device, store: Path, rank: int, size: int) -> Iterator[None]:
    """The default process group of ``size`` ranks that meet at a file."""
    backend = kind_of(device).collectives
    dist.init_process_group(backend, init_method=store.as_uri(), rank=rank, world_size=size)
    try:
        yield
        dist.barrier()  # a rank that left early would close connections that others still use
    finally:
        dist.destroy_process_group()


def main(rank: int, size: int, folder: Path) -> None:
    """Measure what the folder's task says."""
    task = read_json(folder / TASK, Task)
    device = torch.device(task.device)
    if kind_of(device).is_host:
        return_large_frees(False)
    else:
        torch.get_device_module(device).set_device(device)
    torch.manual_seed(rank)  # operands differ; nothing is compared between ranks
    speeds = measured(task, rank, size, folder)
    if rank == 0:
        (folder / FOUND).write_text(text_of(speeds), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
