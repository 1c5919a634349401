"""Host memory for CPU offload, and whether the device has memory of its own.

Offloaded tensors are allocated inside ``host_memory()``, pinned if the device copies them asynchronously. All tensors
of the dry run are on a fake CPU; this context tells it which memory an allocation belongs to. PyTorch's pinned
allocator rounds up to a power of two, and the dry run counts that.

On a CPU, device memory is host memory. ``has_separate_host_memory`` is then False, and offload leaves tensors in
place. The dry run answers for the planned device.

FSDP2 with CPU offload copies shards and gradients by ``Tensor.to(device)``. If both memories are on the CPU (dry run,
tests), this copies nothing; only then two functions of FSDP2 are wrapped to make the copy.

The state is global, because autograd may run backward hooks on another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.hardware.kinds import kind_of
from shardwise.runtime.torch_private_fsdp import fsdp_copies

_nesting = 0
_pinned = False
_own_memory_override: bool | None = None


@contextmanager
def host_memory(pinned: bool = False) -> Iterator[None]:
    """Allocations inside the context count as host memory; ``pinned`` ones are pinned on a real device.

    FSDP2 does not pin gradients that it accumulates or passes to a hook; for these the count is an upper bound.
    """
    global _nesting, _pinned
    before, _pinned = _pinned, pinned
    _nesting += 1
    try:
        yield
    finally:
        _nesting -= 1
        _pinned = before


def in_host_memory() -> bool:
    """Whether a ``host_memory`` context is open."""
    return _nesting > 0


def allocated_host_bytes(size: int) -> int:
    """Bytes that an allocation of ``size`` > 0 takes in the open context."""
    return 1 << (size - 1).bit_length() if _pinned else size


@contextmanager
def separate_host_memory(value: bool) -> Iterator[None]:
    """Override ``has_separate_host_memory`` inside the context, for the dry run and for tests on a CPU."""
    global _own_memory_override
    before, _own_memory_override = _own_memory_override, value
    try:
        with _copies_of_shards() if value else nullcontext():
            yield
    finally:
        _own_memory_override = before


def has_separate_host_memory(device: torch.device) -> bool:
    """Whether ``device`` has memory of its own."""
    return not kind_of(device).is_host if _own_memory_override is None else _own_memory_override


def host_empty_like(tensor: Tensor) -> Tensor:
    """An undefined tensor of the same shape and dtype in host memory, pinned for a tensor of an accelerator."""
    with host_memory(pinned=True):
        return torch.empty_like(tensor, device="cpu", pin_memory=not kind_of(tensor.device).is_host)


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor itself if it is in host memory, else a copy that is valid once the device's stream has made it."""
    if kind_of(tensor.device).is_host:
        return tensor
    return host_empty_like(tensor).copy_(tensor, non_blocking=True)


def host_bytes(size: int, device: torch.device) -> Tensor:
    """``size`` undefined bytes in host memory, pinned for a CUDA device."""
    with host_memory(pinned=True):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=not kind_of(device).is_host)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a pageable tensor to the device without waiting: it is pinned first."""
    return (tensor if kind_of(device).is_host else tensor.pin_memory()).to(device, non_blocking=True)


class _Copying(TorchFunctionMode):
    """Turns ``tensor.to(device)`` into a copy to a tensor from ``empty``, on any device."""

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
    """Inside the context FSDP2 really copies its offloaded shards and their gradients."""

    def copied_inputs(parameter: Any, inputs: Callable[[], Any]) -> list[Tensor]:
        with _Copying(torch.empty_like) if parameter.offload_to_cpu else nullcontext():
            return list(inputs())

    def copied_gradients(parameters: Any, reduce: Callable[[], Any]) -> Any:
        with _Copying(host_empty_like) if parameters[0].offload_to_cpu else nullcontext():
            return reduce()

    with fsdp_copies(copied_inputs, copied_gradients):
        yield
