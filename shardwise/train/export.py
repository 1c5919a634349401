"""What a run leaves for other programs: an adapter in PEFT's format, whole, whatever divided it.

Every rank puts what it holds of a tensor at its place in a tensor of zeros, and the ranks are summed; of copies one
counts. Where the pieces do not add up to the whole (an empty tensor, a short one) nothing is written: that is how
adapters have been lost elsewhere, behind a success message. Rank 0 writes into a folder beside, reads it back, compares
every value, and only then renames it into place.

Adapters are small, so the whole of one tensor at a time on every rank is no price.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError
from shardwise.engine.build import Run
from shardwise.engine.persistent import parameters_of
from shardwise.model.adapted import AdaptedModel
from shardwise.model.fingerprint import fingerprint_of
from shardwise.model.lora import is_adapter
from shardwise.model.peft import TENSORS, AdapterFiles, write_adapter
from shardwise.model.slices import local_part, local_slices
from shardwise.train import commit
from shardwise.train.checkpoint import on_rank_0

Place = tuple[tuple[int, int], ...]
"""Where a piece begins and ends in every dim of the whole."""

FOLDER = "adapter"
"""Below a run's folder."""


def leave(run: Run, folder: Path) -> Path | None:
    """Write what others can use of a run into its folder, on all ranks at once; None where there is nothing.

    Raises CheckpointError on every rank, ResourceError where the disk refuses; what was there before is then untouched.
    """
    blueprint = run.blueprint
    if not isinstance(blueprint, AdaptedModel):
        return None
    parameters = parameters_of(run)
    dtype = run.dtypes.compute
    tensors = {name: tensor.to(dtype) for name, tensor in gathered(run, parameters).items()}
    fingerprint = fingerprint_of(run.model)
    target = folder / FOLDER
    on_rank_0(lambda: _write(target, tensors, blueprint, fingerprint))
    return target


def gathered(run: Run, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The whole adapters on the CPU of every rank, by name. Raises CheckpointError for one that is not whole."""
    assert isinstance(run.blueprint, AdaptedModel)
    mine = {name: _place(p) for name, p in parameters.items() if is_adapter(name)}
    everyone: list[dict[str, Place]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, Tensor] = {}
    for name, shape in run.blueprint.adapter_shapes.items():
        places = [held.get(name) for held in everyone]
        _require_whole(name, shape, {place for place in places if place is not None})
        value = torch.zeros(shape, dtype=run.dtypes.storage, device=run.device)
        if name in mine and places.index(mine[name]) == dist.get_rank():
            part = local_part(parameters[name])
            value[local_slices(parameters[name])] = part.to(value)
        dist.all_reduce(value)
        whole[name] = value.cpu()
    return whole


def _place(parameter: Tensor) -> Place:
    """Where this rank's piece lies in the whole; () where it holds nothing of it."""
    if local_part(parameter).numel() == 0:
        return ()
    return tuple((span.start, span.stop) for span in local_slices(parameter))


def _require_whole(name: str, shape: tuple[int, ...], places: set[Place]) -> None:
    found = sum(math.prod(stop - start for start, stop in place) for place in places if place)
    if found != math.prod(shape):
        raise CheckpointError(
            "the adapter is not whole",
            where=name,
            why=f"the ranks hold {found:,} of its {math.prod(shape):,} values, so nothing is written",
            fix="report this with the run's plan.json",
        )


def _write(target: Path, tensors: Mapping[str, Tensor], model: AdaptedModel, fingerprint: str | None) -> None:
    """On rank 0: beside, back, and into place."""
    beside = target.with_name(f"tmp-{target.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        write_adapter(beside, tensors, model.config(), fingerprint)
        _require_same(beside, tensors)
        for path in beside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        commit.sync(target.parent)
    except OSError as error:
        raise commit.unwritable(error, target.parent) from error


def _require_same(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless what is on disk is what was to be written."""
    files = AdapterFiles(folder)
    for name, tensor in tensors.items():
        if files.shapes.get(name) != tuple(tensor.shape) or not torch.equal(files.read(name), tensor):
            raise CheckpointError(
                "the adapter was not written as it is",
                where=str(folder / TENSORS),
                why=f"{name} reads back otherwise",
                fix="check the disk, and save again",
            )
