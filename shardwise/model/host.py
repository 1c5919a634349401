"""Host memory beside the device's: where what is offloaded goes, and whether that is another place at all.

Everything that is meant to lie in host memory is allocated inside ``host_memory()``, pinned where the device copies
from it on its own. A run needs no more than that. The dry run, whose tensors are all on the fake CPU, reads from it
which memory an allocation takes, and so counts both memories, and every copy between them, by the code that trains.
What is pinned takes the next power of two, because PyTorch's pinned allocator rounds up to that; the dry run counts it.

On a CPU the device's memory *is* the host's. ``apart`` says so, and whoever offloads then leaves tensors where they
are: a copy would take memory twice to free it once. The dry run answers for the device that is planned for.

FSDP2, told to keep shards in host memory, brings them to the device and gradients back by ``Tensor.to(device)``. Where
both memories are the CPU's and only told apart, that would copy nothing, so there, and only there, its two functions
that do so are wrapped, and the copy is made. On a real device they are as they are.

A variable of the module, not of a context: autograd may run backward hooks on another thread, and there is one step
at a time in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.overrides import TorchFunctionMode

_depth = 0
_pinned = False
_told: bool | None = None


@contextmanager
def host_memory(pinned: bool = False) -> Iterator[None]:
    """What is allocated in this block lies in host memory; ``pinned``, it is or becomes so on a real device.

    FSDP2 does not pin the gradients that it adds to others, or hands to a hook: of those the count is an upper bound.
    """
    global _depth, _pinned
    before, _pinned = _pinned, pinned
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        _pinned = before


def in_host_memory() -> bool:
    """Whether a ``host_memory`` block is open."""
    return _depth > 0


def taken_in_host_memory(size: int) -> int:
    """Bytes that an allocation of ``size`` > 0 takes in the block that is open."""
    return 1 << (size - 1).bit_length() if _pinned else size


@contextmanager
def memories_apart(told: bool) -> Iterator[None]:
    """In this block ``apart`` is what is told, whatever the device: for the dry run, and for tests without one."""
    global _told
    before, _told = _told, told
    try:
        with _copies_of_shards() if told else nullcontext():
            yield
    finally:
        _told = before


def apart(device: torch.device) -> bool:
    """Whether ``device`` has a memory of its own."""
    return device.type != "cpu" if _told is None else _told


def host_empty_like(tensor: Tensor) -> Tensor:
    """Undefined values of a plain tensor's shape and dtype in host memory, pinned for a device of its own memory."""
    with host_memory(pinned=True):
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def host_bytes(size: int, device: torch.device) -> Tensor:
    """``size`` undefined bytes in host memory, pinned where ``device`` has a memory of its own."""
    with host_memory(pinned=True):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of pageable memory on the device; the host does not wait for it, as it would copying from there."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class _Copying(TorchFunctionMode):
    """Makes ``tensor.to(device)`` a copy into what ``empty`` makes, whatever the device."""

    def __init__(self, empty: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._empty = empty

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            return self._empty(args[0]).copy_(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _copies_of_shards() -> Iterator[None]:
    """FSDP2 copies the shards that it keeps in host memory, and their gradients, in this block."""
    group: Any = _fsdp_param_group
    parameter: Any = FSDPParam
    inputs, reduce = parameter.all_gather_inputs, group.foreach_reduce

    def brought(one: FSDPParam) -> list[Tensor]:
        with _Copying(torch.empty_like) if one.offload_to_cpu else nullcontext():
            return list(inputs.fget(one))

    def taken_back(several: list[FSDPParam], *args: Any, **kwargs: Any) -> Any:
        with _Copying(host_empty_like) if several[0].offload_to_cpu else nullcontext():
            return reduce(several, *args, **kwargs)

    parameter.all_gather_inputs, group.foreach_reduce = property(brought), taken_back
    try:
        yield
    finally:
        parameter.all_gather_inputs, group.foreach_reduce = inputs, reduce
