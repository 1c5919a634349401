"""One process of a calibration: ``python -m shardwise.doctor.calibration.rank RANK SIZE FOLDER``.

All ranks measure the same at the same time, so each has its share of the machine. Rank 0 writes the tables. An
accelerator is measured by one process: its kernels, and the host that launches them. Collectives are those of its
profile.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.json_file import read_json, text_of
from shardwise.doctor.calibration.collectives import collective_curves
from shardwise.doctor.calibration.kernels import attention, native, plain_curves, products
from shardwise.doctor.calibration.steps import (
    MODELS,
    PLAIN_STEPS,
    TINY,
    WIDE,
    TimedStep,
    around_collectives,
    host_seconds,
    launch_seconds,
    ratios,
    timed_step,
)
from shardwise.hardware.kinds import kind_of
from shardwise.hardware.measured import Grid, MeasuredSpeeds
from shardwise.trainer.meter import return_large_frees

TASK, FOUND = "task.json", "found.json"
_WHOLE = "world"
"""Stands for the number of ranks."""
AXES: dict[str, dict[str, Any]] = {
    "replicate": {"zero_stage": 0},
    "shard": {"zero_stage": 3},
    "tensor": {"tensor_parallel": _WHOLE},
    "sequence": {"sequence_parallel": _WHOLE},
}
"""Settings that give all ranks to a mesh axis."""


@dataclass(frozen=True)
class Task:
    """What the ranks measure.

    Attributes:
        device: as torch names it: cpu, or cuda:0.
        dtypes: of products, as far as they are native; () leaves the kernels to ``known``.
        known: what fewer processes found, in the share of these processes.
    """

    device: str
    dtypes: tuple[str, ...]
    known: MeasuredSpeeds | None = None


def measured(task: Task, device: torch.device) -> MeasuredSpeeds:
    """The speeds of this process, while all ranks are busy."""
    found = task.known
    if task.dtypes:
        found = _kernels(task, device)
    assert found is not None
    found = replace(found, threads=torch.get_num_threads())
    return _collectives(found, device) if dist.get_world_size() > 1 else found


def _kernels(task: Task, device: torch.device) -> MeasuredSpeeds:
    """The speeds of kernels; and of the host, which a single process measures."""
    found = MeasuredSpeeds(dist.get_world_size(), 1, {}, {}, plain_curves(device))
    native_dtypes = [dtype for dtype in task.dtypes if dtype == "fp32" or native(dtype, device)]
    grids, heads = dict[str, Grid](), dict[str, Grid]()
    for dtype in native_dtypes:
        dist.barrier()
        grids[dtype] = products(dtype, device)
        heads |= attention(dtype, device)
    found = replace(found, products=grids, attention=heads)
    if not kind_of(device).is_host:
        # Mixed precision casts and gathers weights around every block, which only the host notices.
        precision = "bf16" if "bf16" in native_dtypes else "fp32"
        step = timed_step(TINY, 64, 2, {"precision": precision}, device, PLAIN_STEPS)
        return replace(found, host=launch_seconds(step))
    found = replace(found, ratios=ratios(_steps(device, native_dtypes), found.plain))
    if task.known is not None:
        return replace(found, host=task.known.host)
    return replace(found, host=host_seconds(timed_step(TINY, 64, 2, {}, device, PLAIN_STEPS), found))


def _steps(device: torch.device, dtypes: list[str]) -> list[TimedStep]:
    """Steps of every model in fp32, and of one in bf16; with several ranks, also of one that shards its weights."""
    steps = [timed_step(*model, {"precision": "fp32", "zero_stage": 0}, device) for model in MODELS]
    if "bf16" in dtypes:
        steps.append(timed_step(*MODELS[1], {"precision": "bf16", "zero_stage": 0}, device))
    if dist.get_world_size() > 1:
        steps.append(timed_step(*MODELS[1], {"precision": "fp32", "zero_stage": 3}, device))
    return steps


def _collectives(found: MeasuredSpeeds, device: torch.device) -> MeasuredSpeeds:
    """``found`` with the curves of collectives, and the host's seconds around them by mesh axis."""
    found = replace(found, collectives=collective_curves())
    world = dist.get_world_size()
    around, waiting = dict[str, float](), dict[str, float]()
    for axis, settings in AXES.items():
        given = {key: world if value == _WHOLE else value for key, value in settings.items()}
        small, large = (timed_step(model, 64, 2, given, device, PLAIN_STEPS) for model in (TINY, WIDE))
        around[axis], waiting[axis] = around_collectives(small, large, found, axis)
    return replace(found, around=around, waiting=waiting)


def main(rank: int, size: int, folder: Path) -> None:
    """Measure what the folder's task says."""
    task = read_json(folder / TASK, Task)
    device = torch.device(task.device)
    kind = kind_of(device)
    if kind.is_host:
        return_large_frees(False)
    else:
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        kind.collectives, init_method=(folder / "store").as_uri(), rank=rank, world_size=size
    )
    torch.manual_seed(rank)
    found = measured(task, device)
    if rank == 0:
        (folder / FOUND).write_text(text_of(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
