"""The tracker: sees every allocation, free, kernel and collective of one rank.

The tracker is a dispatch mode *below* DTensor and above the fake mode. It returns ``NotImplemented`` for DTensor, so it
sees the operations on local shards. It follows storages, not tensors. A storage counts from the first operation that
returns it until it is freed. FSDP2 frees and regrows gathered parameters with ``UntypedStorage.resize_``. No dispatch
mode sees that call, so the tracker patches the method.

The purpose of an allocation is known only later: a gradient is known once it is in ``.grad``, an activation once it
outlives its forward pass. So the tracker records every allocation, and dryrun/reading.py computes the ledger
afterwards.

PyTorch's MemTracker and FSDPMemTracker also count the global-shape tensors of DTensor's sharding propagation, three
times the unsharded model. This tracker ignores operations during propagation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.core.cost import Collective, CountedCall, Kernel, Transfer
from shardwise.dryrun.counting import TEMPLATED, collective_of, group_of, kernels_of, noted_kernels_of
from shardwise.dryrun.modules import refused
from shardwise.dryrun.tally import Tally
from shardwise.engine.phase import current_micro_batch, current_phase
from shardwise.runtime.flops import tensor_bytes
from shardwise.runtime.offload.host import allocated_host_bytes, has_separate_host_memory, in_host_memory
from shardwise.runtime.operands import tensors_in
from shardwise.runtime.torch_private import (
    NEEDS_VALUES,
    DispatchMode,
    FakeTensor,
    local_tensor,
    reading_a_value,
    sharding_propagation_in,
    storage_key,
)
from shardwise.runtime.torch_private_fake import know_value, value_of

# Ledger rows that a tag can name. If a storage has several tags, the first in this order counts.
TAGS: tuple[str, ...] = (
    "overhead",
    "optimizer_state",
    "gradients",
    "master_weights",
    "parameters",
    "communication",
    "activations",
)

EXCHANGED = "exchanged"
"""Tag of tensors that functional collectives read and return. The model owns them and may save them."""

_READING = ("setup", "optimizer")
"""The phases in which the host reads values. A model must not: its step would wait for the device."""


@dataclass(eq=False)
class Allocation:
    """One lifetime of one storage, from an allocation to its free.

    Times count tracker events. ``stream`` 0 is the default stream. ``on_host`` marks host memory, which takes no
    device memory (runtime/offload/host.py). ``called`` marks those of a module's forward call, also in the backward
    phase.
    """

    size: int
    born: int
    phase: str
    where: str
    grad_enabled: bool
    operation: str
    origin: StorageOrigin
    stream: int
    died: int | None = None
    on_host: bool = False
    micro_batch: int | None = None
    called: bool = False

    def lives_at(self, time: int) -> bool:
        return self.born <= time and (self.died is None or self.died > time)


@dataclass(eq=False)
class StorageOrigin:
    """Tags of a storage, over all its lifetimes."""

    tags: set[str] = field(default_factory=set)
    gathered: bool = False


def asked_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """The device of a fake tensor if the operation only asks for it. That is over half of all dispatched calls."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


class Tracker(DispatchMode):
    """Records the allocations, kernels and collectives of one rank inside the ``with`` block.

    Args:
        axis_of: mesh axis by process group name.
        workspace: bytes that the backend allocates during a collective, from (kind, payload bytes); see
            dryrun/target.py.
        kept: bytes that a library keeps for every distinct call of a kernel, from its name, arguments and result.
        where: returns the name of the running module.
        calls: returns whether it runs forward.
        notes: returns a dict that all calls of this operation like the last one share (StaticFakeMode.notes).
    """

    def __init__(
        self,
        axis_of: Mapping[str, str],
        workspace: Callable[[str, int], int],
        kept: Callable[[str, Any, Any], int],
        where: Callable[[], str],
        calls: Callable[[], bool] = bool,
        notes: Callable[[Any], dict[Any, Any] | None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.workspaces: list[tuple[int, int]] = []  # of collectives: (time, bytes), freed at once
        self.phases: list[tuple[int, str]] = []  # (time, phase) at every change
        self.tallies: dict[int | None, Tally] = {}  # by micro-batch; None: the rest of the step
        self.calls: list[tuple[int | None, CountedCall]] = []  # what the tallies count, in order
        self.now = 0
        self.counting_costs = False
        self.disk_bytes = 0
        self.groups: set[str] = set()  # groups of several ranks that this rank used
        self._uses_host = False
        self._axis_of = axis_of
        self._workspace = workspace
        self._kept = kept
        self._seen: set[tuple[Any, ...]] = set()  # calls whose kept bytes have been counted
        self._where = where
        self._calls = calls
        self._notes = notes
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self._living: dict[int, Allocation] = {}  # by key of the storage, as the two below
        self._origins: dict[int, StorageOrigin] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._muted = 0  # blocks of ``muted`` that are entered

    @property
    def tally(self) -> Tally:
        """Costs of the running micro-batch, or of the step outside micro-batches."""
        number = current_micro_batch()
        if number not in self.tallies:
            self.tallies[number] = Tally()
        return self.tallies[number]

    # -- storages -----------------------------------------------------------------------------------

    def _tick(self) -> int:
        self.now += 1
        phase = current_phase()
        if not self.phases or self.phases[-1][1] != phase:
            self.phases.append((self.now, phase))
        return self.now

    def _stream(self) -> int:
        """Number of the current stream, in order of first use. CUDA's allocator has a pool for each stream.

        CPU streams do nothing, but FSDP2 enters and leaves them as it does on CUDA.
        """
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(stream, len(self._streams))

    def _birth(self, key: int, size: int, operation: str) -> None:
        if size == 0:
            return
        on_host = in_host_memory() and has_separate_host_memory(torch.device("cpu"))
        self._uses_host |= on_host
        allocation = Allocation(
            allocated_host_bytes(size) if on_host else size,  # pinned memory is allocated in powers of two
            self._tick(),
            current_phase(),
            self._where(),
            torch.is_grad_enabled(),
            operation,
            self._origins[key],
            self._stream(),
            on_host=on_host,
            micro_batch=current_micro_batch(),
            called=self._calls(),
        )
        self.allocations.append(allocation)
        self._living[key] = allocation

    def _death(self, key: int) -> None:
        if (allocation := self._living.pop(key, None)) is not None:
            allocation.died = self._tick()

    def _meet(self, tensor: Tensor, operation: str) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._references:
            return

        def gone(_: object) -> None:
            self._death(key)
            self._references.pop(key, None)
            self._origins.pop(key, None)

        self._references[key] = weakref.ref(storage, gone)
        self._origins[key] = StorageOrigin()
        self._birth(key, storage.nbytes(), operation)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key not in self._references or self._muted:
            return
        # Only all-gathered weights are ever resized: FSDP2 frees them after use.
        self._origins[key].gathered = True
        self._death(key)
        self._birth(key, storage.nbytes(), "resize")

    def tag(self, tensors: Iterable[Tensor], tag: str) -> None:
        """Add a tag to the storages of tensors, which may be DTensors."""
        for tensor in tensors:
            piece = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            if isinstance(piece, FakeTensor):
                self._meet(piece, "tagged")
                self._origins[storage_key(piece.untyped_storage())].tags.add(tag)

    # -- operations ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor then calls operations on local tensors
        if func is reading_a_value() and current_phase() in _READING:
            return value_of(args[0])
        name = func.name()
        if name == "_c10d_functional::wait_tensor":
            return args[0]  # as on a device; the fake kernel returns a new tensor
        into = kwargs.get("out") if func.namespace == "_c10d_functional" else None  # as above
        try:
            out = func(*args, **kwargs) if into is None else into
        except NEEDS_VALUES as error:
            raise refused(name, self._where(), current_phase() in _READING) from error
        except RuntimeError as error:
            error.add_note(f"{name} in {self._where() or 'the loss'}")
            raise
        if self._muted:
            return out
        for tensor in tensors_in(out):
            if isinstance(tensor, FakeTensor):
                self._meet(tensor, name)
                if current_phase() in _READING:
                    know_value(func, tensor)
        if name.startswith("shardwise::disk_"):
            self._use_disk(name, args)
            return out
        if (size := self._kept(name, args, out)) > 0:
            self._keep(name, args, size)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._communicate(func, args, kwargs, out)
        elif name.startswith("fsdp::chunk_cat"):  # from torch 2.15 on with a suffix
            self.tag(args[0], "gradients")
        if self.counting_costs:
            self._count(func, args, kwargs, out)
        return out

    def _use_disk(self, name: str, args: tuple[Any, ...]) -> None:
        """Count reserved disk space, and bytes read and written (runtime/offload/disk.py)."""
        if name == "shardwise::disk_reserve":
            self.disk_bytes += args[-1]
        elif self.counting_costs:
            way = name.removeprefix("shardwise::")
            self._spend(transfers=[Transfer(current_phase(), way, 0, tensor_bytes(args[:1]))])

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count device kernels, host kernels, or copies between host and device memory."""
        call = (current_phase(), func, args, kwargs, out)
        notes = self._notes(func)
        kernels = kernels_of(*call) if notes is None else noted_kernels_of(notes, *call)
        if kernels and self._uses_host:
            kernels = self._placed(kernels, func.name(), args, kwargs, out)
        self._spend(kernels=kernels)

    def _placed(
        self, kernels: Sequence[Kernel], name: str, args: Any, kwargs: Any, out: Any
    ) -> Sequence[Kernel]:
        """The kernels, marked where they run on the host; a copy between the memories is counted instead."""
        # The written tensor comes first: the result, or the argument changed in place.
        seen = out if name.startswith(TEMPLATED) else (out, args, kwargs)
        tensors = [t for t in tensors_in(seen) if isinstance(t, FakeTensor) and t.ndim > 0]
        memories = {self._on_host(t) for t in tensors}
        if memories == {True, False}:
            assert "copy" in name, f"{name} mixes host and device memory; a device would refuse it"
            way = "to_host" if self._on_host(tensors[0]) else "to_device"
            pairs = zip(*args[:2], strict=True) if name.startswith("aten::_foreach") else [args[:2]]
            sizes = [tensor_bytes(pair[:1]) for pair in pairs]
            self._spend(transfers=[Transfer(current_phase(), way, 0, size) for size in sizes])
            if any(self._keeps_activations(t) for t in tensors):
                self.tag((t for t in tensors if not self._on_host(t)), "activations")
            return ()
        if memories == {True}:
            if name.startswith("aten::empty"):
                return ()  # a host allocation writes nothing
            return [replace(kernel, on_host=True) for kernel in kernels]
        return kernels

    def _spend(
        self,
        kernels: Sequence[Kernel] = (),
        collectives: Sequence[Collective] = (),
        transfers: Sequence[Transfer] = (),
    ) -> None:
        """Count calls in the tally of the running micro-batch."""
        calls: list[CountedCall] = [*kernels, *collectives, *transfers]
        if calls:
            self.tally.add_calls(kernels, collectives, transfers)
            self.calls += zip(itertools.repeat(current_micro_batch()), calls)

    def _on_host(self, tensor: Tensor) -> bool:
        living = self._living.get(storage_key(tensor.untyped_storage()))
        return living is not None and living.on_host

    def _keeps_activations(self, tensor: Tensor) -> bool:
        """Whether this is host memory allocated in a forward pass, which holds offloaded activations."""
        living = self._living.get(storage_key(tensor.untyped_storage()))
        return living is not None and living.on_host and living.phase == "forward"

    def _keep(self, name: str, args: Any, size: int) -> None:
        """Count the bytes that a library keeps, once per shape, from the start of the run: step 1 has made the call."""
        tensors = (t for t in tensors_in(args) if isinstance(t, FakeTensor))
        signature = (name, *((t.shape, t.stride(), t.dtype) for t in tensors))
        if signature not in self._seen:
            self._seen.add(signature)
            origin = StorageOrigin({"overhead"})
            self.allocations.append(Allocation(size, 1, "build", "", False, name, origin, 0))

    def _communicate(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [t for t in tensors_in(args, kwargs, out) if isinstance(t, FakeTensor)]
        # In the forward pass a pipeline stage sends activations, which it also saves; gradients exist only to be sent.
        # Functional collectives are part of the computation: autograd may save their inputs and outputs.
        if current_phase() != "forward" or not func.name().startswith(("c10d::send", "c10d::recv_")):
            self.tag(tensors, "communication" if func.namespace == "c10d" else EXCHANGED)
        group = group_of(args, kwargs)
        if group is not None and group.size() > 1:
            self.groups.add(group.group_name)
        collective = collective_of(current_phase(), func, args, kwargs, self._axis_of)
        if collective is None:
            return
        self.workspaces.append((self._tick(), self._workspace(collective.kind, collective.bytes)))
        if self.counting_costs:
            self._spend(collectives=[collective])

    # -- entering and leaving -----------------------------------------------------------------------

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignore operations in this block, such as those of sharding propagation."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def watching(self) -> Iterator[Tracker]:
        """Track everything in this block."""
        resize = torch.UntypedStorage.resize_

        def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = watched_resize  # type: ignore[method-assign, assignment]
        try:
            with sharding_propagation_in(self.muted), self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            self._tick()


def axis_names(axes: Iterable[tuple[str, dist.ProcessGroup]]) -> dict[str, str]:
    """Process-group name to mesh axis. Where one group serves several axes, the first named axis wins."""
    names: dict[str, str] = {}
    for axis, group in axes:
        names.setdefault(group.group_name, axis)
    return names
