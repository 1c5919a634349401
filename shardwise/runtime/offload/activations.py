"""Activation offload: saved tensors of blocks are in host memory between forward and backward pass.

Tensors that autograd saves in a block go through ``saved_tensors_hooks``; recomputation (selective.py, segments.py)
saves by ``save_offloaded``. All saved tensors of one call of a block form a group. When the next block begins, the
group's storages are copied to pinned host memory on a copy stream, while that block computes. When that block ends, the
device's stream waits for the copies and the storages are freed. In the backward pass, opening a group prefetches the
group before it. So two groups are on the device at a time. The last two blocks never move, because the backward pass
needs them at once.

Storages are moved, not tensors. A storage that several operations or views save is copied once and comes back as one
storage with the same strides and offsets, so gradients are bit-identical. Not moved: weights and buffers; storages
smaller than ``smallest``; arguments of two blocks in a row, such as a mask or rotary angles; and a storage that a later
block saves again, because then the model still holds it.

Lifetimes follow from references and the order of calls only, never from the completion of an event. So the dry run
counts the lifetimes of a real device, and the host never waits. ``record_stream`` would free memory at times that
cannot be predicted. ``torch.autograd.graph.save_on_cpu`` copies every saved tensor separately, waits for
each copy and does not prefetch. The price: a block's memory is freed one block later.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.runtime.offload.copy_stream import CopyStream
from shardwise.runtime.offload.host import has_separate_host_memory
from shardwise.runtime.storages import (
    Storages,
    bytes_of_storage,
    is_wrapper_subclass,
    outside_autograd,
    storage_keys,
    storages_in,
)
from shardwise.runtime.torch_private import in_backward, storage_key, version_of

ON_DEVICE = 2
"""Block calls whose activations are on the device: one in use, one being copied."""

SMALLEST = 32 * 1024
"""Bytes of the smallest storage that is moved. At 50 GB/s smaller copies take less time than their launch."""


class SavedTensor(Protocol):
    """A tensor that is kept for the backward pass, on the device or in host memory."""

    def value(self) -> Tensor | None:
        """The tensor on the device; None when it was written to after it was saved."""
        ...


_running_call: _BlockCall | None = None
"""The block call that runs forward. A module variable, because a process runs one step at a time."""


def save_offloaded(tensor: Tensor) -> SavedTensor:
    """Save a tensor for the backward pass, offloaded like the saved tensors of the block that runs."""
    return _OnDevice(tensor, None) if _running_call is None else _running_call.pack(tensor)


class OffloadedBlocks:
    """Offloads the activations of a model's blocks between forward and backward pass.

    Args:
        model: its weights and buffers are never moved.
        blocks: in the order of their calls, before they are sharded, so that gathered weights are recognised.
        smallest: bytes of the smallest storage that is moved.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], smallest: int = SMALLEST) -> None:
        self.smallest = smallest
        self.stream = CopyStream()
        self._known: weakref.WeakValueDictionary[int, _SavedStorage] = weakref.WeakValueDictionary()
        self._newest: _BlockCall | None = None
        self._ended: _BlockCall | None = None
        self._leaving: _BlockCall | None = None
        self._open: list[ExitStack] = []
        for index, block in enumerate(blocks):
            self._watch(model, block, index == 0, leaves=index < len(blocks) - ON_DEVICE)

    def _watch(self, model: nn.Module, block: nn.Module, first: bool, leaves: bool) -> None:
        @functools.cache
        def fixed() -> list[dict[str, Any]]:  # read at the first call: later techniques replace layers
            owners = [module._buffers for module in model.modules()]
            return owners + [module._parameters for module in block.modules()]

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._open.append(stack := ExitStack())
            # Not in a second run inside the backward pass: its saved tensors are used at once.
            if torch.is_grad_enabled() and not in_backward():
                tensors = (tensor for owner in fixed() for tensor in owner.values() if tensor is not None)
                given = storages_in((args, kwargs))
                if first:
                    self._newest = self._ended = None
                self._send(given)
                self._newest = _BlockCall(self, self._newest, leaves, given, set(storage_keys(tensors)))
                stack.enter_context(_saving(self._newest))

        def after(*_: object) -> None:
            if self._open:
                self._open.pop().close()

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after, always_call=True)

    def known(self, tensor: Tensor) -> _SavedStorage | None:
        """The saved storage of this tensor, if it has the values of now."""
        storage = self._known.get(storage_key(tensor.untyped_storage()))
        return storage if storage is not None and storage.holds(tensor) else None

    def remember(self, tensor: Tensor, storage: _SavedStorage) -> None:
        self._known[storage_key(tensor.untyped_storage())] = storage

    def finished(self, group: _BlockCall) -> None:
        """A block has ended: free the storages of the block before it."""
        self._ended, leaving = group, self._leaving
        if leaving is not None:
            self.stream.wait_for_copies()
            for storage in leaving.storages():
                storage.let_go(leaving)
            self._leaving = None

    @torch.no_grad()
    def _send(self, given: Storages) -> None:
        """A block begins with these arguments: start to copy the storages of the block before it to the host."""
        group, self._ended = self._ended, None
        if group is None or not group.leaves:
            return
        for storage in group.storages():
            storage.stay_if_in(group.given, given)
        if storages := [storage for storage in group.storages() if storage.may_leave()]:
            with self.stream.copying(storages[0].device):
                for storage in storages:
                    storage.copy_to_host()
            self._leaving = group

    def fetch(self, storages: Iterable[_SavedStorage]) -> None:
        """Start to copy storages back to the device."""
        absent = [storage for storage in storages if storage.on_device is None and not storage.written]
        if not absent:
            return
        # Allocated on the device's stream, which also frees it; the copy stream waits for the allocation.
        room = [torch.empty(s.size, dtype=torch.uint8, device=s.device) for s in absent]
        with self.stream.copying(absent[0].device):
            for storage, device_bytes in zip(absent, room, strict=True):
                storage.copy_to_device(device_bytes)


@contextmanager
def _saving(group: _BlockCall) -> Iterator[None]:
    """Tensors that autograd saves in this block belong to ``group``."""
    global _running_call
    before, _running_call = _running_call, group
    try:
        with saved_tensors_hooks(group.pack, unpack):
            yield
    finally:
        _running_call = before
    group.home.finished(group)


def unpack(saved: SavedTensor) -> Tensor:
    """A saved tensor. RuntimeError when it was written to after it was saved."""
    value = saved.value()
    if value is None:
        raise RuntimeError(
            "a tensor that is needed for gradient computation has been modified by an inplace operation"
        )
    return value


class _BlockCall:
    """The saved tensors of one call of a block.

    Attributes:
        leaves: whether they are moved to the host.
        given: storages of the call's arguments.
    """

    def __init__(
        self,
        home: OffloadedBlocks,
        previous: _BlockCall | None,
        leaves: bool,
        given: Storages,
        fixed: set[int],
    ) -> None:
        self.home = home
        self.leaves = leaves
        self.given = given
        self._previous = previous
        self._fixed = fixed
        self._storages: list[weakref.ref[_SavedStorage]] = []  # weak: a dropped storage need not be copied
        self._saves = False
        self._opened = False

    def storages(self) -> Iterator[_SavedStorage]:
        return (storage for reference in self._storages if (storage := reference()) is not None)

    def pack(self, tensor: Tensor) -> SavedTensor:
        self._saves = True
        tensor = outside_autograd(tensor)  # a result's node would hold itself through its saved tensors
        if is_wrapper_subclass(tensor):
            return _SavedSubclass(tensor, self)
        if not self._is_movable(tensor):
            return _OnDevice(tensor, self)
        storage = self.home.known(tensor)
        if storage is None:
            if not self.leaves:
                return _OnDevice(tensor, self)
            storage = _SavedStorage(tensor, self)
            self.home.remember(tensor, storage)
            self._storages.append(weakref.ref(storage))
        else:
            if storage.owner is not self:
                storage.saved_again(tensor, self)
                self._storages.append(weakref.ref(storage))
            storage.watch(tensor)
        return _StorageView(storage, tensor, self)

    def _is_movable(self, tensor: Tensor) -> bool:
        ordinary = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        if not ordinary or not has_separate_host_memory(tensor.device):
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return (
            size >= self.home.smallest
            and size % tensor.element_size() == 0  # its bytes become a view in its dtype again
            and storage_key(storage) not in self._fixed
        )

    def open(self) -> None:
        """The backward pass has reached this call: fetch its storages, and prefetch those of the call before."""
        if self._opened:
            return
        self._opened = True
        self.home.fetch(self.storages())
        self.home.stream.wait_for_copies()
        ahead, self._previous = self._previous, None
        while ahead is not None and not ahead._saves:  # it is never opened
            ahead = ahead._previous
        if ahead is not None:
            self.home.fetch(ahead.storages())


class _SavedStorage:
    """One storage: on the device, in host memory, or in both while it is copied.

    Attributes:
        on_device: any tensor over it, or its bytes after they were copied back.
        owner: the last call that saves it and moves it; None for a storage that stays.
        written: whether it was written to after it was saved. It must not be used then.
    """

    def __init__(self, tensor: Tensor, owner: _BlockCall) -> None:
        self.on_device: Tensor | None = tensor
        self.owner: _BlockCall | None = owner
        self.written = False
        self.device = tensor.device
        self.size = tensor.untyped_storage().nbytes()
        self._home = owner.home
        self._in_host: Tensor | None = None
        self._copied = 0  # the number of its last copy, on its stream
        self._version = version_of(tensor)
        self._watched: list[tuple[Tensor, int]] = []
        self.watch(tensor)
        self._original = weakref.ref(tensor.untyped_storage())

    def __del__(self) -> None:
        self._give_back()
        if self.on_device is not None:
            # Its memory may be reused from here on, so wait for its own copies, but not for later ones.
            self._home.stream.wait_for_copies(self._copied)

    def watch(self, tensor: Tensor) -> None:
        """Watch the version counter of a tensor over it; aliases may have counters of their own."""
        if self.on_device is not None:
            self._watched.append((tensor, version_of(tensor)))

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is the storage of ``tensor`` with its present values."""
        self._look()
        unchanged = self.on_device is not None or version_of(tensor) == self._version
        return self._original() is not None and not self.written and unchanged

    def saved_again(self, tensor: Tensor, group: _BlockCall) -> None:
        """A later call saves it too: it is moved with that call, or stays if moving it had freed nothing."""
        if self.on_device is None:
            self.on_device, self.owner = tensor, None
            self._give_back()
        elif self.owner is not None:
            self.owner = group

    def stay_if_in(self, *calls: Storages) -> None:
        """Keep it on the device when it is an argument of all these calls: the caller holds it."""
        original = self._original()
        if original is not None and all(
            (given := call.get(storage_key(original))) is not None and given() is original for call in calls
        ):
            self.owner = None

    def may_leave(self) -> bool:
        self._look()
        return self._in_host is None and self.owner is not None and not self.written

    def copy_to_host(self) -> None:
        assert self.on_device is not None
        self._in_host = self._home.stream.take(self.size, self.device)
        self._in_host[: self.size].copy_(bytes_of_storage(self.on_device), non_blocking=True)
        self._copied = self._home.stream.queued

    def let_go(self, owner: _BlockCall) -> None:
        """Free the device memory, unless a later call owns it."""
        if self.owner is owner and self._in_host is not None:
            self._look()
            self.on_device = None
            self._watched.clear()

    def copy_to_device(self, room: Tensor) -> None:
        assert self._in_host is not None
        room.copy_(self._in_host[: self.size], non_blocking=True)
        self._copied = self._home.stream.queued
        self.on_device, self.owner = room, None
        self.watch(room)
        self._give_back()  # the next copy into it is later on the same stream

    def as_tensor(self) -> Tensor | None:
        """All bytes on the device; None when it was written to."""
        self._look()
        if self.on_device is None and not self.written:
            self._home.fetch([self])
            self._home.stream.wait_for_copies()
        return None if self.written or self.on_device is None else bytes_of_storage(self.on_device)

    def _look(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._watched):
            self.written = True

    def _give_back(self) -> None:
        if self._in_host is not None:
            self._home.stream.give_back(self._in_host)
            self._in_host = None


class _OnDevice:
    """A saved tensor that stays on the device."""

    def __init__(self, tensor: Tensor, group: _BlockCall | None) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)
        self._group = group

    def value(self) -> Tensor | None:
        if self._group is not None:
            self._group.open()
        return self._tensor if version_of(self._tensor) == self._version else None


class _StorageView:
    """A saved tensor over a storage that may be moved."""

    def __init__(self, storage: _SavedStorage, tensor: Tensor, group: _BlockCall) -> None:
        self._storage = storage
        self._group = group
        self._dtype = tensor.dtype
        self._geometry = tensor.size(), tensor.stride(), tensor.storage_offset()

    def value(self) -> Tensor | None:
        with torch.no_grad():
            self._group.open()
            whole = self._storage.as_tensor()
            return None if whole is None else whole.view(self._dtype).as_strided(*self._geometry)


class _SavedSubclass:
    """A saved tensor subclass that wraps other tensors, such as a DTensor."""

    def __init__(self, tensor: Any, group: _BlockCall) -> None:
        names, self._context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        self._parts = {name: group.pack(part) for name, part in inner.items() if isinstance(part, Tensor)}
        self._rest = {name: part for name, part in inner.items() if name not in self._parts}
        self._kind: Any = type(tensor)
        self._shape = tensor.size(), tensor.stride()

    def value(self) -> Tensor | None:
        parts = {name: kept.value() for name, kept in self._parts.items()}
        if any(part is None for part in parts.values()):
            return None
        whole: Tensor = self._kind.__tensor_unflatten__({**parts, **self._rest}, self._context, *self._shape)
        return whole
