"""Which part of a global tensor this rank holds, under which name, and which names share one tensor.

Values are written into parameters after techniques have divided them, so whoever writes (seeded values, a
safetensors file, a user's ``reset_parameters``) asks here for the slice to make, and makes only that.

Chosen: integer arithmetic on the placements. ``compute_local_shape_and_global_offset`` of torch goes through
index tensors, one element per row, and gives the shape and first row of a strided shard but not the promise
that its rows are contiguous; here the order in which shards were cut is followed (FSDP2 cuts what tensor
parallelism left, but lists itself first), which always gives contiguous rows, and the result is checked
against the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Slices = tuple[slice, ...]
"""One slice per dim, of the global tensor."""

# What wrappers insert into names: activation checkpointing, torch.compile, the parts of a pipeline's rank.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod|_part\d+)\.")


def canonical_name(name: str) -> str:
    """The name a tensor had before any wrapper: values are seeded and looked up by it."""
    return _WRAPPERS.sub("", name)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical names and parameters; a shared one once, under its first name."""
    for name, parameter in model.named_parameters():
        yield canonical_name(name), parameter


def local_part(tensor: Tensor) -> Tensor:
    """The plain tensor this rank holds of ``tensor``, writable in place, outside autograd."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def local_slices(tensor: Tensor) -> Slices:
    """Where ``local_part(tensor)`` lies in the global tensor. Empty slices on a rank that holds nothing.

    Raises RuntimeError for a placement that is not a contiguous block of the global tensor.
    """
    spans = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return tuple(slice(0, 0) for _ in spans)
        for axis, placement in _in_cutting_order(tensor.placements):
            start, stop = spans[placement.dim]
            spans[placement.dim] = _chunk(start, stop, coordinate[axis], tensor.device_mesh.size(axis))
        held = tuple(local_part(tensor).shape)
        if held != tuple(stop - start for start, stop in spans):
            raise RuntimeError(f"{tensor.placements} of {tuple(tensor.shape)} is not contiguous on this rank")
    return tuple(slice(start, stop) for start, stop in spans)


def _in_cutting_order(placements: tuple[Placement, ...]) -> list[tuple[int, _StridedShard]]:
    """(mesh axis, shard) in the order in which the tensor was cut: strided ones last."""
    plain, strided = [], []
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            strided.append((axis, placement))
        elif placement.is_shard():
            plain.append((axis, cast("_StridedShard", placement)))
        elif placement.is_partial():
            raise RuntimeError("a tensor of partial sums holds no part of the values")
    return plain + strided


def _chunk(start: int, stop: int, index: int, chunks: int) -> tuple[int, int]:
    """The index-th part of [start, stop) as ``torch.chunk`` divides: equal parts, the last ones shorter."""
    size = -(-(stop - start) // chunks)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def shared_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter, and its first. For a model as its constructor left it."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            aliases[name] = earlier
    return aliases


def share(model: nn.Module, aliases: dict[str, str]) -> None:
    """Make parameters shared again. ``to_empty`` gives each name of a plain parameter a tensor of its own."""
    if not aliases:
        return
    owners = {
        canonical_name(f"{path}.{name}" if path else name): (module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter is not None
    }
    for alias, first in aliases.items():
        if alias in owners and first in owners:
            (module, name), (holder, held) = owners[alias], owners[first]
            parameter = getattr(holder, held)
            if getattr(module, name) is not parameter:
                setattr(module, name, parameter)
