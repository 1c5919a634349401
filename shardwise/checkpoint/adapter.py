"""Write a run's adapter in PEFT's format, unsharded, under every strategy.

Each rank copies its shard of a tensor into a tensor of zeros, and an all-reduce sums the ranks; one of several replicas
counts. If the shards do not cover the whole tensor, nothing is written: other systems have lost adapters behind a
success message. Rank 0 writes to a temporary folder, reads it back, compares every value, and then renames it.

An adapter that is there is replaced file by file, each by one rename, so that a reader finds a whole adapter at every
moment. Its config is the same at every step of a run. The header names the checkpoint with the same weights; a run
whose adapter is of another checkpoint, because it was killed in between, writes it again.

Adapters are small, so every rank can hold one whole tensor at a time.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.checkpoint import commit
from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.checkpoint import on_rank_0
from shardwise.checkpoint.run_folder import ADAPTER, SAVED_AS
from shardwise.core.atomic_file import sync_folder
from shardwise.core.errors import CheckpointError
from shardwise.core.file_hash import hash_of
from shardwise.engine.run import Run
from shardwise.engine.run_state import parameters_of
from shardwise.model.adapted import AdaptedModel
from shardwise.model.files.peft import CONFIG, TENSORS, AdapterFiles, write_adapter
from shardwise.runtime.parallel.shard_slices import local_part, local_slices

ShardRange = tuple[tuple[int, int], ...]
"""Start and end of a shard in every dim of the whole tensor."""


def adapter_folder(folder: Path) -> Path:
    """The folder of an adapter; of a run's folder, that of the adapter that the run trained."""
    of_run = folder / ADAPTER
    return of_run if not (folder / CONFIG).is_file() and (of_run / CONFIG).is_file() else folder


def leave(run: Run, folder: Path, checkpoint: Path | None = None) -> Path | None:
    """Write the run's adapter to its folder. Collective. Returns None if the run has no adapter.

    Args:
        checkpoint: the one with the same weights.

    Raises:
        CheckpointError: an adapter is incomplete; raised on every rank. The previous folder is then untouched.
        ResourceError: the disk is full or not writable. The previous folder is then untouched.
    """
    write = adapter_writer(run, folder, checkpoint)
    write()
    return folder / ADAPTER if isinstance(run.blueprint, AdaptedModel) else None


def adapter_writer(run: Run, folder: Path, checkpoint: Path | None = None) -> Callable[[], None]:
    """Gather the run's present adapter; the result writes it, later. Both are collective and raise like ``leave``.

    Args:
        checkpoint: the one with the same weights, committed when the result is called; its hash goes into the header.
    """
    blueprint = run.blueprint
    if not isinstance(blueprint, AdaptedModel):
        return lambda: None
    parameters = parameters_of(run)
    dtype = run.options.dtypes.compute
    tensors = {name: tensor.to(dtype) for name, tensor in gathered_adapter(run, parameters).items()}
    fingerprint = blueprint.base_fingerprint(run.model)
    target = folder / ADAPTER

    def write() -> None:
        entries = {SAVED_AS: hash_of(checkpoint / manifests.MANIFEST)} if checkpoint else {}
        _write_adapter(target, tensors, blueprint, fingerprint, entries)

    return lambda: on_rank_0(write)


def gathered_adapter(run: Run, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The unsharded adapter tensors on the CPU of every rank, by name. Raises CheckpointError for an incomplete one."""
    assert isinstance(run.blueprint, AdaptedModel)
    shapes = run.blueprint.adapter_shapes
    mine = {name: _shard_range(p) for name, p in parameters.items() if name in shapes}
    everyone: list[dict[str, ShardRange]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        places = [ranges.get(name) for ranges in everyone]
        _require_whole(name, shape, {shard_range for shard_range in places if shard_range is not None})
        value = torch.zeros(shape, dtype=run.options.dtypes.storage, device=run.device)
        if name in mine and places.index(mine[name]) == dist.get_rank():
            part = local_part(parameters[name])
            value[local_slices(parameters[name])] = part.to(value)
        dist.all_reduce(value)
        whole[name] = value.cpu()
    return whole


def _shard_range(parameter: Tensor) -> ShardRange:
    """Range of this rank's shard in the whole tensor; () if the shard is empty."""
    if local_part(parameter).numel() == 0:
        return ()
    return tuple((span.start, span.stop) for span in local_slices(parameter))


def _require_whole(name: str, shape: tuple[int, ...], places: set[ShardRange]) -> None:
    count = sum(
        math.prod(stop - start for start, stop in shard_range) for shard_range in places if shard_range
    )
    if count != math.prod(shape):
        raise CheckpointError(
            "the adapter is incomplete",
            where=name,
            why=f"the ranks hold {count:,} of its {math.prod(shape):,} values, so it was not written",
            fix="report this with the run's plan.json",
        )


def _write_adapter(
    target: Path,
    tensors: Mapping[str, Tensor],
    model: AdaptedModel,
    fingerprint: str | None,
    entries: Mapping[str, str],
) -> None:
    """On rank 0: write to a temporary folder, read back, rename."""
    staged = target.with_name(f"tmp-{target.name}")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        write_adapter(staged, tensors, model.config(), fingerprint, entries)
        _require_equal_tensors(staged, tensors)
        for path in staged.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if target.is_dir():
            for name in (CONFIG, TENSORS):
                (staged / name).replace(target / name)
            staged.rmdir()
        else:
            staged.rename(target)
        sync_folder(target)
        sync_folder(target.parent)
    except OSError as error:
        raise commit.unwritable(error, target.parent) from error


def _require_equal_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the files hold the given tensors."""
    files = AdapterFiles(folder)
    for name, tensor in tensors.items():
        if files.shapes.get(name) != tuple(tensor.shape) or not torch.equal(files.read(name), tensor):
            raise CheckpointError(
                "the adapter was not written correctly",
                where=str(folder / TENSORS),
                why=f"{name} reads back with other values",
                fix="check the disk, and save again",
            )
