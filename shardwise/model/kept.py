"""What blocks keep for the backward pass, in host memory while it is not needed.

Every call of a block is a *group*. What autograd saves in it goes through ``saved_tensors_hooks``, and what others
keep for a second run of it (selective.py, segments.py) through ``keep``. When the next block begins, the group's
storages are copied to the host on a side stream, beside that block; when it ends, the device's stream waits for the
copies and the storages are let go. When the backward pass opens a group, the group before it is sent for. So two
groups lie on the device, one in use and one on its way, and the last two, which are needed at once, never leave.

Storages are moved, not tensors: what several operations keep, or several views of it, is copied once and comes back
as one storage with the same views, so kernels see the very strides and offsets, and gradients are the same to the
bit. Not moved: weights and buffers, which stay anyway; what is so small that starting a copy costs more than it
saves; what two blocks in a row are called with, such as a mask or rotary angles; and what a later block saves again
although it had left: somebody held it, so copying it had freed nothing.

Lifetimes follow references and the order of calls alone, never an event's completion, so the dry run sees the
lifetimes that a device has. Nothing waits on the host's side. Refused: ``record_stream``, after which memory is free
at a time that nobody can predict; ``torch.autograd.graph.save_on_cpu``, which copies every save, shared or not, waits
for each copy, and brings nothing ahead. The price is that a block's memory is let go one block late.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.model.host import apart
from shardwise.model.lanes import Lanes
from shardwise.model.storages import (
    Storages,
    bytes_of_storage,
    is_made_of_others,
    outside_autograd,
    storage_keys,
    storages_in,
)

ON_DEVICE = 2
"""Groups that lie on the device: one in use, one on its way."""

SMALLEST = 64 * 1024
"""Bytes from which on a storage is moved: at 50 GB/s less than that takes less time than its copy takes to start."""


class Kept(Protocol):
    """One tensor that is kept for the backward pass, wherever its values lie."""

    def value(self) -> Tensor | None:
        """The tensor on the device; None when it was written to after it was kept."""
        ...


_running: _Group | None = None
"""The group of the block that runs forward: of the module, for there is one step at a time in a process."""


def keep(tensor: Tensor) -> Kept:
    """Keep a tensor for the backward pass as autograd does in the block that runs."""
    return _Here(tensor, None) if _running is None else _running.pack(tensor)


class OffloadedBlocks:
    """Blocks whose groups lie in host memory between their passes.

    Args:
        model: whose weights and buffers are never moved.
        blocks: in the order of their calls, before they are sharded: weights are recognised as they are gathered.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], smallest: int | None = None) -> None:
        self.smallest = SMALLEST if smallest is None else smallest
        self.lanes = Lanes()
        self._known: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._newest: _Group | None = None
        self._ended: _Group | None = None
        self._leaving: _Group | None = None
        self._open: list[ExitStack] = []
        buffers = [module._buffers for module in model.modules()]
        for index, block in enumerate(blocks):
            weights = [module._parameters for module in block.modules()]
            leaves = index < len(blocks) - ON_DEVICE
            self._watch(block, index == 0, leaves, [*weights, *buffers])

    def _watch(self, block: nn.Module, first: bool, leaves: bool, fixed: list[dict[str, Any]]) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._open.append(stack := ExitStack())
            # Not in a second run, within the backward pass: what that keeps is used at once.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                tensors = (tensor for owner in fixed for tensor in owner.values() if tensor is not None)
                given = storages_in((args, kwargs))
                if first:
                    self._newest = self._ended = None
                self._send(given)
                self._newest = _Group(self, self._newest, leaves, given, set(storage_keys(tensors)))
                stack.enter_context(_saving(self._newest))

        def after(*_: object) -> None:
            if self._open:
                self._open.pop().close()

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after, always_call=True)

    def known(self, tensor: Tensor) -> _Storage | None:
        """What is kept of this tensor's storage as it is now."""
        storage = self._known.get(tensor.untyped_storage()._cdata)
        return storage if storage is not None and storage.holds(tensor) else None

    def remember(self, tensor: Tensor, storage: _Storage) -> None:
        self._known[tensor.untyped_storage()._cdata] = storage

    def finished(self, group: _Group) -> None:
        """A block has ended: let go of what the one before has kept."""
        self._ended, leaving = group, self._leaving
        if leaving is not None:
            self.lanes.arrived()
            for storage in leaving.storages():
                storage.let_go(leaving)
            self._leaving = None

    @torch.no_grad()
    def _send(self, given: Storages) -> None:
        """A block begins, called with this: send what the one before has kept on its way."""
        group, self._ended = self._ended, None
        if group is None or not group.leaves:
            return
        for storage in group.storages():
            storage.stay_if_in(group.given, given)
        if storages := [storage for storage in group.storages() if storage.may_leave()]:
            with self.lanes.beside(storages[0].device):
                for storage in storages:
                    storage.copy_to_host()
            self._leaving = group

    def fetch(self, storages: Iterable[_Storage]) -> None:
        """Begin to copy back what is not on the device."""
        absent = [storage for storage in storages if storage.on_device is None and not storage.written]
        if not absent:
            return
        # Room is made on the device's own stream, which frees it too; the side stream waits until it is free.
        room = [torch.empty(s.size, dtype=torch.uint8, device=s.device) for s in absent]
        with self.lanes.beside(absent[0].device):
            for storage, device_bytes in zip(absent, room, strict=True):
                storage.copy_to_device(device_bytes)


@contextmanager
def _saving(group: _Group) -> Iterator[None]:
    """What autograd saves in this block belongs to ``group``."""
    global _running
    before, _running = _running, group
    try:
        with saved_tensors_hooks(group.pack, unpack):
            yield
    finally:
        _running = before
    group.home.finished(group)


def unpack(kept: Kept) -> Tensor:
    """What autograd has saved, as it was; RuntimeError where it was written to since."""
    value = kept.value()
    if value is None:
        raise RuntimeError(
            "a tensor that is needed for gradient computation has been modified by an inplace operation"
        )
    return value


class _Group:
    """What one call of a block keeps. ``leaves`` says that it goes to the host, ``given`` what it was called with."""

    def __init__(
        self, home: OffloadedBlocks, previous: _Group | None, leaves: bool, given: Storages, fixed: set[int]
    ) -> None:
        self.home = home
        self.leaves = leaves
        self.given = given
        self._previous = previous
        self._fixed = fixed
        self._storages: list[weakref.ref[_Storage]] = []  # weak: what nobody asks for need not be copied
        self._saves = False
        self._opened = False

    def storages(self) -> Iterator[_Storage]:
        return (storage for reference in self._storages if (storage := reference()) is not None)

    def pack(self, tensor: Tensor) -> Kept:
        self._saves = True
        tensor = outside_autograd(tensor)  # a result's node would hold itself by what it saves
        if is_made_of_others(tensor):
            return _Wrapped(tensor, self)
        if not self._is_movable(tensor):
            return _Here(tensor, self)
        storage = self.home.known(tensor)
        if storage is None:
            if not self.leaves:
                return _Here(tensor, self)
            storage = _Storage(tensor, self)
            self.home.remember(tensor, storage)
            self._storages.append(weakref.ref(storage))
        else:
            if storage.owner is not self:
                storage.saved_again(tensor, self)
                self._storages.append(weakref.ref(storage))
            storage.watch(tensor)
        return _View(storage, tensor, self)

    def _is_movable(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or not apart(tensor.device):
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return (
            size >= self.home.smallest
            and size % tensor.element_size() == 0
            and storage._cdata not in self._fixed
        )

    def open(self) -> None:
        """The backward pass is here: all must be on the device, and the group before on its way."""
        if self._opened:
            return
        self._opened = True
        self.home.fetch(self.storages())
        self.home.lanes.arrived()
        ahead, self._previous = self._previous, None
        while ahead is not None and not ahead._saves:
            ahead = ahead._previous
        if ahead is not None:
            self.home.fetch(ahead.storages())


class _Storage:
    """One storage: on the device, in host memory, or in both while it is copied.

    Attributes:
        on_device: any tensor over it, or its bytes once they have come back.
        owner: the last group that keeps it, with which it leaves; None for one that stays.
        written: whether it was written to after it was kept, so that nobody may use it.
    """

    def __init__(self, tensor: Tensor, owner: _Group) -> None:
        self.on_device: Tensor | None = tensor
        self.owner: _Group | None = owner
        self.written = False
        self.device = tensor.device
        self.size = tensor.untyped_storage().nbytes()
        self._home = owner.home
        self._in_host: Tensor | None = None
        self._copied = 0  # the number of its last copy, on its lanes
        self._version = tensor._version
        self._watched: list[tuple[Tensor, int]] = []
        self.watch(tensor)
        self._original = weakref.ref(tensor.untyped_storage())

    def __del__(self) -> None:
        self._give_back()
        if self.on_device is not None:
            # Its memory is free from here on, also where nobody has used what is still being copied; for copies of the
            # next group, which are on their way, nothing waits.
            self._home.lanes.arrived(self._copied)

    def watch(self, tensor: Tensor) -> None:
        """A tensor over it, which may count its versions apart from the others; while it is on the device."""
        if self.on_device is not None:
            self._watched.append((tensor, tensor._version))

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is the storage of ``tensor``, with the values that it has now."""
        self._look()
        unchanged = self.on_device is not None or tensor._version == self._version
        return self._original() is not None and not self.written and unchanged

    def saved_again(self, tensor: Tensor, group: _Group) -> None:
        """A later group keeps it too: it leaves with that one, or stays where it had left in vain."""
        if self.on_device is None:
            self.on_device, self.owner = tensor, None
            self._give_back()
        elif self.owner is not None:
            self.owner = group

    def stay_if_in(self, *calls: Storages) -> None:
        """Several blocks in a row are called with it: whoever calls them holds it."""
        original = self._original()
        if original is not None and all(
            (given := call.get(original._cdata)) is not None and given() is original for call in calls
        ):
            self.owner = None

    def may_leave(self) -> bool:
        self._look()
        return self._in_host is None and self.owner is not None and not self.written

    def copy_to_host(self) -> None:
        assert self.on_device is not None
        self._in_host = self._home.lanes.take(self.size, self.device)
        self._in_host[: self.size].copy_(bytes_of_storage(self.on_device), non_blocking=True)
        self._copied = self._home.lanes.queued

    def let_go(self, owner: _Group) -> None:
        """Leave the device, if it has not become another group's."""
        if self.owner is owner and self._in_host is not None:
            self._look()
            self.on_device = None
            self._watched.clear()

    def copy_to_device(self, room: Tensor) -> None:
        assert self._in_host is not None
        room.copy_(self._in_host[: self.size], non_blocking=True)
        self._copied = self._home.lanes.queued
        self.on_device, self.owner = room, None
        self.watch(room)
        self._give_back()  # the next copy into it comes after this one, on the same stream

    def as_tensor(self) -> Tensor | None:
        """The bytes, on the device."""
        self._look()
        if self.on_device is None and not self.written:
            self._home.fetch([self])
            self._home.lanes.arrived()
        return None if self.written or self.on_device is None else bytes_of_storage(self.on_device)

    def _look(self) -> None:
        if any(tensor._version != version for tensor, version in self._watched):
            self.written = True

    def _give_back(self) -> None:
        if self._in_host is not None:
            self._home.lanes.give_back(self._in_host)
            self._in_host = None


class _Here:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor, group: _Group | None) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._group = group

    def value(self) -> Tensor | None:
        if self._group is not None:
            self._group.open()
        return self._tensor if self._tensor._version == self._version else None


class _View:
    """A tensor over a storage that may move."""

    def __init__(self, storage: _Storage, tensor: Tensor, group: _Group) -> None:
        self._storage = storage
        self._group = group
        self._dtype = tensor.dtype
        self._geometry = tensor.size(), tensor.stride(), tensor.storage_offset()

    def value(self) -> Tensor | None:
        with torch.no_grad():
            self._group.open()
            whole = self._storage.as_tensor()
            return None if whole is None else whole.view(self._dtype).as_strided(*self._geometry)


class _Wrapped:
    """A tensor made of others, such as a DTensor."""

    def __init__(self, tensor: Any, group: _Group) -> None:
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
