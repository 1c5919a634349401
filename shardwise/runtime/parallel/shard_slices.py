"""Shards of a global tensor: which slice this rank holds, under which name, and which names share a tensor.

Initial values, safetensors files and a user's ``reset_parameters`` ask here for this rank's slice and write only that.

Slices follow from the placements by integer arithmetic. torch's ``compute_local_shape_and_global_offset`` uses index
tensors with one element per row, and does not promise contiguous rows for strided shards. Here shards are cut in the
order of their creation: FSDP2 cuts after tensor parallelism, but lists itself first. The rows are then contiguous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from shardwise.runtime.torch_private import is_strided_shard

Slices = tuple[slice, ...]
"""One slice per dim of the global tensor."""

MOMENTS_BLOCK = 128
"""Neighbours in a row that share a scale in 8-bit moments, so they stay on one rank."""

# Name prefixes added by activation checkpointing, torch.compile and pipeline stages.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_orig_mod|_stage\d+)\.")


def canonical_name(name: str) -> str:
    """A tensor's name without wrapper prefixes; seeds and files use it."""
    return _WRAPPERS.sub("", name)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(canonical name, parameter); a shared parameter appears once, under its first name."""
    for name, parameter in model.named_parameters():
        yield canonical_name(name), parameter


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard as a plain tensor outside autograd, writable in place."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def is_divided(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return isinstance(tensor, DTensor)


def shard_dims(
    modules: nn.Module | Sequence[nn.Module], ranks: int
) -> Callable[[nn.Parameter], Shard | None]:
    """For FSDP2, the dim of a parameter to divide over ranks; None is the first.

    It is the second of stacks of matrices, such as experts, that are fewer than the ranks. FSDP2 pads the first dim, so
    ranks beyond the number of matrices would hold nothing, and the others a whole one each. Other dims must be divided
    evenly, and cost a copy of gathered weights and of gradients. Modules that also have adapters or packed codes are
    left out: these are filled one whole matrix after the other.
    """
    stacks = set()
    for module in nn.ModuleList([modules] if isinstance(modules, nn.Module) else modules).modules():
        own = list(module.parameters(recurse=False))
        if len({p.requires_grad for p in own}) == 1 and all(p.is_floating_point() for p in own):
            stacks |= {parameter for parameter in own if parameter.ndim == 3}

    def dim(parameter: nn.Parameter) -> Shard | None:
        if parameter not in stacks:
            return None
        matrices, rows, columns = local_part(parameter).shape
        divided = matrices < ranks and rows % ranks == 0 and rows // ranks * columns % MOMENTS_BLOCK == 0
        return Shard(1) if divided else None

    return dim


def local_slices(tensor: Tensor) -> Slices:
    """The place of ``local_part(tensor)`` in the global tensor; empty slices if this rank has no part.

    Raises RuntimeError for a placement that is not a contiguous block of the global tensor.
    """
    spans = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return tuple(slice(0, 0) for _ in spans)
        for axis, dim in _in_cutting_order(tensor.placements):
            start, stop = spans[dim]
            spans[dim] = _chunk_range(start, stop, coordinate[axis], tensor.device_mesh.size(axis))
        local_shape = tuple(local_part(tensor).shape)
        if local_shape != tuple(stop - start for start, stop in spans):
            raise RuntimeError(f"{tensor.placements} of {tuple(tensor.shape)} is not contiguous on this rank")
    return tuple(slice(start, stop) for start, stop in spans)


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor, on the device of its mesh. Collective for a DTensor (all-gather)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part = local_part(tensor).to(tensor.device_mesh.device_type)
    shape = tensor.shape
    stride = tensor.stride()
    whole = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return whole.full_tensor()


def _in_cutting_order(placements: tuple[Placement, ...]) -> list[tuple[int, int]]:
    """(mesh axis, shard) in the order of cutting: strided shards last."""
    plain, strided = [], []
    for axis, placement in enumerate(placements):
        if is_strided_shard(placement):
            strided.append((axis, cast("Shard", placement).dim))
        elif placement.is_shard():
            plain.append((axis, cast("Shard", placement).dim))
        elif placement.is_partial():
            raise RuntimeError("a tensor of partial sums holds no part of the values")
    return plain + strided


def _chunk_range(start: int, stop: int, index: int, chunks: int) -> tuple[int, int]:
    """The index-th chunk of [start, stop) as ``torch.chunk`` cuts: equal chunks, the last ones shorter."""
    size = -(-(stop - start) // chunks)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def shared_names(model: nn.Module) -> dict[str, str]:
    """Map each additional name of a shared parameter to its first name. For a model as constructed."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            aliases[name] = earlier
    return aliases


def share(model: nn.Module, aliases: dict[str, str]) -> None:
    """Tie parameters again: ``to_empty`` gives every name of a plain parameter its own tensor."""
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
            (module, name), (holder, key) = owners[alias], owners[first]
            module._parameters[name] = holder._parameters[key]
