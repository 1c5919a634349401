"""Count one operation: its FLOPs, the bytes that it moves, and the payload of a collective.

FLOPs come from runtime/flops.py. Bytes count every input and output once, without reuse in caches. Multi-tensor
operations (``_foreach_*``, ``_fused_adamw_``) count as one kernel per tensor. So the number of kernels grows with depth
and a shallow dry run can be extrapolated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.cost import CONTROL_AXIS, Collective, Kernel
from shardwise.runtime.flops import flops_of, product_shape, tensor_bytes
from shardwise.runtime.operands import tensors_in
from shardwise.runtime.torch_private import group_named

TEMPLATED = ("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_")
"""Operations that read only the shape of their argument."""

_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::_fused_sdp_choice")
"""Allocations, a view that does not call itself one, and the choice of an attention kernel: the device runs nothing."""

_LOOKUPS = frozenset({"aten::embedding", "aten::gather", "aten::index_select", "aten::index.Tensor"})
_SCATTERS = frozenset({"aten::scatter_add_", "aten::index_add_"})
"""Operations that touch only the rows or elements of their first argument that the indices name."""

_COLLECTIVES: dict[str, str] = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "send": "send",
}


def noted_kernels_of(
    notes: dict[Any, Any], phase: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> Sequence[Kernel]:
    """``kernels_of``, kept in ``notes``: a dict that all calls share whose arguments have equal metadata.

    A tensor that is given twice is read once, so it matters which arguments are the same tensor.
    """
    identities = [id(tensor) for tensor in tensors_in(args, kwargs)]
    repeats = len(set(identities)) < len(identities)
    # With repeats the key says which arguments are the same: for (a, b, a) it is (phase, 0, 1, 0).
    key = (phase, *map(identities.index, identities)) if repeats else phase
    if (kernels := notes.get(key)) is None:
        kernels = notes[key] = kernels_of(phase, func, args, kwargs, out)
    return cast("Sequence[Kernel]", kernels)


def kernels_of(
    phase: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> list[Kernel]:
    """The kernels that one call launches; [] for views and other calls that move no data."""
    name = func.name()
    if func.is_view or func.namespace not in ("aten", "fsdp", "shardwise") or name.startswith(_NO_KERNEL):
        return []
    tensors = tensors_in(args, kwargs, out)
    if not tensors:
        return []
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    if lists and name.startswith(("aten::_foreach", "aten::_fused")):
        # One kernel for each parameter, which touches the tensor at its index in every list.
        sizes = [sum(t.element_size() * t.numel() for t in piece) for piece in zip(*lists, strict=False)]
        dtype = dtype_name(lists[0][0].dtype)
        return [Kernel(phase, name, dtype, 0, 0, size) for size in sizes]
    # An in-place operation returns its input: count each tensor object once.
    distinct = {id(t): t for t in tensors}.values()
    flops = flops_of(func, args, kwargs, out)
    # A matrix product runs in the dtype of its operands; its result may have another dtype.
    typical = tensors[0] if flops else max(distinct, key=lambda t: t.numel())
    shape = product_shape(func, args) if flops else ()
    moved = _moved_bytes(name, args, out, distinct)
    return [Kernel(phase, name, dtype_name(typical.dtype), 0, flops, moved, shape=shape)]


def _moved_bytes(name: str, args: tuple[Any, ...], out: Any, distinct: Collection[Tensor]) -> int:
    """Bytes that one call reads and writes: all of its tensors, except where it touches only a part of one."""
    if name.startswith(TEMPLATED):
        return tensor_bytes(tensors_in(out))
    # It copies the shards into one part of its output, so it reads and writes as much as the shards have.
    if name == "fsdp::all_gather_copy_in":
        return 2 * tensor_bytes(args[0])
    if name not in _LOOKUPS and name not in _SCATTERS:
        return tensor_bytes(distinct)
    others = [tensor for tensor in distinct if tensor is not args[0]]
    if name in _LOOKUPS:  # reads as much of the table as it returns
        return tensor_bytes(others) + tensor_bytes(tensors_in(out))
    # It reads and writes as much of the table as it adds.
    return tensor_bytes(others) + 2 * tensor_bytes(args[-1:])


_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e5m2fnuz: "fp8",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in device profiles."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def dtype_named(name: str) -> torch.dtype:
    """The first dtype with this name in device profiles."""
    return next(dtype for dtype, known_name in _DTYPES.items() if known_name == name)


def collective_of(
    phase: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis_of: Mapping[str, str]
) -> Collective | None:
    """The collective of a c10d call; None for calls that send no data (wait, barrier on a fake group)."""
    name = func.name().split("::")[1].strip("_")
    kind = next((kind for prefix, kind in _COLLECTIVES.items() if name.startswith(prefix)), None)
    group = group_of(args, kwargs)
    if kind is None or group is None:
        return None
    tensors = tensors_in(args, kwargs)
    # Gathered output or scattered input: the payload is the largest tensor of the call.
    payload = max(tensors, key=lambda t: t.numel())
    elements = payload.numel()
    # A functional all-gather returns its output, so the arguments are this rank's share alone.
    if func.namespace == "_c10d_functional" and kind == "all_gather" and "out" not in kwargs:
        elements *= group.size()
    # One element is a verdict or a count, not traffic of the model.
    axis = CONTROL_AXIS if elements == 1 else axis_of.get(group.group_name, "world")
    return Collective(kind, axis, group.size(), 0, elements, elements * payload.element_size(), phase)


def group_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """The process group in the arguments of a c10d call, or None."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:
                continue  # a ReduceOp
        if isinstance(value, str) and (group := _named_group(value)) is not None:
            return group
    return None


def _named_group(name: str) -> dist.ProcessGroup | None:
    """The group with this name, or None: the reduce operation of a functional collective is a string too."""
    try:
        return group_named(name)
    except RuntimeError:
        return None
