"""The tracker: sees every allocation, free, kernel and collective of one rank.

A dispatch mode that lies *below* DTensor (it hands DTensor operations back, so that it sees the operations on
the local pieces) and above the fake mode. It follows storages, not tensors: a storage is counted once when it
first appears in an operation's output, and until it dies. FSDP2 frees and regrows gathered parameters with
``UntypedStorage.resize_``, which no dispatch mode sees, so that method is watched as well.

What an allocation is *for* is known later than its birth: a gradient is known when it lies in ``.grad``, an
activation when it outlives its forward pass. So the tracker keeps one record per allocation and the ledger is
read off afterwards (dryrun/reading.py).

Refused: PyTorch's MemTracker and FSDPMemTracker, which count the global-shape tensors of DTensor's sharding
propagation (3 times the unsharded model, planner note 3); here propagation runs muted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.core.cost import Kernel, Transfer
from shardwise.dryrun.counting import collective_of, group_of, kernels_of
from shardwise.dryrun.tally import Tally
from shardwise.engine.phase import current_micro_batch, current_phase
from shardwise.model.flops import bytes_of
from shardwise.model.host import apart, in_host_memory, taken_in_host_memory

# Where a tag says what a storage is for, the first in this order wins.
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
"""What functional collectives send and return: tensors of the model's own, which may be kept."""

_TEMPLATED = ("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_")
"""Operations that read nothing of their argument but its shape."""


@dataclass(eq=False)
class Allocation:
    """One stretch of life of one storage. Times count tracker events; ``stream`` 0 is the default one.

    ``on_host`` says that it lies in host memory and takes nothing from the device's (model/host.py).
    """

    size: int
    born: int
    phase: str
    where: str
    grad_enabled: bool
    operation: str
    origin: Origin
    stream: int
    died: int | None = None
    on_host: bool = False


@dataclass(eq=False)
class Origin:
    """What is known about a storage over all its lives."""

    tags: set[str] = field(default_factory=set)
    gathered: bool = False


def asked_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """The device of a fake tensor, where that is all that is asked: more than half of what is dispatched."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


class Tracker(TorchDispatchMode):
    """Records what one rank does between ``start`` and the end of the ``with`` block.

    Args:
        axis_of: the mesh axis of a process group, by its name.
        workspace: bytes that a collective's backend allocates for itself during a call, from
            (kind, payload bytes); see dryrun/target.py.
        kept: bytes that a library keeps for every distinct call of a kernel, from its name and result.
        where: names the module that is running.
    """

    def __init__(
        self,
        axis_of: Mapping[str, str],
        workspace: Callable[[str, int], int],
        kept: Callable[[str, Any], int],
        where: Callable[[], str],
    ) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.workspaces: list[tuple[int, int]] = []  # of collectives: (time, bytes), gone at once
        self.phases: list[tuple[int, str]] = []  # (time, phase) at every change
        self.tallies: dict[int | None, Tally] = {}  # by micro-batch; None is the rest of the step
        self.now = 0
        self.counting_costs = False
        self.disk_bytes = 0
        self.groups: set[str] = set()  # names of those of several ranks that it sent or received in
        self._axis_of = axis_of
        self._workspace = workspace
        self._kept = kept
        self._seen: set[tuple[Any, ...]] = set()
        self._where = where
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self._living: dict[int, Allocation] = {}
        self._origins: dict[int, Origin] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._muted = 0

    @property
    def tally(self) -> Tally:
        """What the running micro-batch costs, or what all of them share."""
        return self.tallies.setdefault(current_micro_batch(), Tally())

    # -- life of storages ---------------------------------------------------------------------------

    def _tick(self) -> int:
        self.now += 1
        phase = current_phase()
        if not self.phases or self.phases[-1][1] != phase:
            self.phases.append((self.now, phase))
        return self.now

    def _stream(self) -> int:
        """The stream whose pool CUDA's allocator would serve now, numbered as they appear.

        The CPU's streams do nothing, but FSDP2 enters and leaves them all the same.
        """
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(stream, len(self._streams))

    def _birth(self, key: int, size: int, operation: str) -> None:
        if size == 0:
            return
        on_host = in_host_memory() and apart(torch.device("cpu"))
        allocation = Allocation(
            taken_in_host_memory(size) if on_host else size,
            self._tick(),
            current_phase(),
            self._where(),
            torch.is_grad_enabled(),
            operation,
            self._origins[key],
            self._stream(),
            on_host=on_host,
        )
        self.allocations.append(allocation)
        self._living[key] = allocation

    def _death(self, key: int) -> None:
        if (allocation := self._living.pop(key, None)) is not None:
            allocation.died = self._tick()

    def _meet(self, tensor: Tensor, operation: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return

        def gone(_: object) -> None:
            self._death(key)
            self._references.pop(key, None)
            self._origins.pop(key, None)

        self._references[key] = weakref.ref(storage, gone)
        self._origins[key] = Origin()
        self._birth(key, storage.nbytes(), operation)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._references or self._muted:
            return
        # Only weights that are gathered for use and freed afterwards are ever resized.
        self._origins[key].gathered = True
        self._death(key)
        self._birth(key, storage.nbytes(), "resize")

    def tag(self, tensors: Iterable[Tensor], tag: str) -> None:
        """Say what the storages of some (possibly distributed) tensors are for."""
        for tensor in tensors:
            piece = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(piece, FakeTensor):
                self._meet(piece, "tagged")
                self._origins[piece.untyped_storage()._cdata].tags.add(tag)

    # -- operations ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = func.name()
        if name == "_c10d_functional::wait_tensor":
            return args[0]  # as on a device; the kernel for fake tensors makes another tensor
        into = kwargs.get("out") if func.namespace == "_c10d_functional" else None  # likewise
        out = func(*args, **kwargs) if into is None else into
        if self._muted:
            return out
        for tensor in tree_iter(out):
            if isinstance(tensor, FakeTensor):
                self._meet(tensor, name)
        if name.startswith("shardwise::disk_"):
            self._use_disk(name, args)
            return out
        if (size := self._kept(name, out)) > 0:
            self._keep(name, args, size)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._communicate(func, args, kwargs, out)
        elif name == "fsdp::chunk_cat":
            self.tag(args[0], "gradients")
        if self.counting_costs:
            self._count(func, args, kwargs, out)
        return out

    def _use_disk(self, name: str, args: tuple[Any, ...]) -> None:
        """What is reserved on a disk, and what is read from it and written to it (model/disk.py)."""
        if name == "shardwise::disk_reserve":
            self.disk_bytes += args[-1]
        elif self.counting_costs:
            way = name.removeprefix("shardwise::")
            self.tally.transfers[Transfer(current_phase(), way, 0, bytes_of(args[:1]))] += 1

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Kernels of the device, kernels of the host, or copies between the two memories."""
        kernels: Iterable[Kernel] = kernels_of(current_phase(), func, args, kwargs, out)
        if not kernels:
            return
        name = func.name()
        # What an operation writes comes first: the result, or the argument that it changes in place.
        seen = out if name.startswith(_TEMPLATED) else (out, args, kwargs)
        tensors = [t for t in tree_iter(seen) if isinstance(t, FakeTensor) and t.ndim > 0]
        memories = {self._on_host(t) for t in tensors}
        if memories == {True, False}:
            assert "copy" in name, f"{name} mixes host and device memory: a device would refuse it"
            way = "to_host" if self._on_host(tensors[0]) else "to_device"
            pairs = zip(*args[:2], strict=True) if name.startswith("aten::_foreach") else [args[:2]]
            sizes = [bytes_of(pair[:1]) for pair in pairs]
            self.tally.transfers.update(Transfer(current_phase(), way, 0, size) for size in sizes)
            if any(self._keeps_activations(t) for t in tensors):
                self.tag((t for t in tensors if not self._on_host(t)), "activations")
            return
        if memories == {True}:
            if name.startswith("aten::empty"):
                return  # a processor writes nothing to make room
            kernels = (replace(kernel, on_host=True) for kernel in kernels)
        self.tally.kernels.update(kernels)

    def _on_host(self, tensor: Tensor) -> bool:
        living = self._living.get(tensor.untyped_storage()._cdata)
        return living is not None and living.on_host

    def _keeps_activations(self, tensor: Tensor) -> bool:
        """Whether this is host memory that a forward pass has taken: for what it keeps for the backward pass."""
        living = self._living.get(tensor.untyped_storage()._cdata)
        return living is not None and living.on_host and living.phase == "forward"

    def _keep(self, name: str, args: Any, size: int) -> None:
        """Count what a library keeps for this call, once per shape and from the start: step 1 has met it."""
        tensors = (t for t in tree_iter(args) if isinstance(t, FakeTensor))
        signature = (name, *((t.shape, t.stride(), t.dtype) for t in tensors))
        if signature not in self._seen:
            self._seen.add(signature)
            origin = Origin({"overhead"})
            self.allocations.append(Allocation(size, 1, "build", "", False, name, origin, 0))

    def _communicate(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [t for t in tree_iter((args, kwargs, out)) if isinstance(t, FakeTensor)]
        # What one stage hands to the next are its activations; only their gradients are there to be sent. Functional
        # collectives are steps of the computation: what they read and return may be kept as it is.
        if current_phase() != "forward" or not func.name().startswith(("c10d::send", "c10d::recv_")):
            self.tag(tensors, "communication" if func.namespace == "c10d" else EXCHANGED)
        group = group_of(args, kwargs)
        if group is not None and group.size() > 1:
            self.groups.add(group.group_name)
        collective = collective_of(func, args, kwargs, self._axis_of)
        if collective is None:
            return
        size = self._workspace(collective.kind, collective.bytes)
        self.workspaces.append((self._tick(), size))
        if self.counting_costs:
            self.tally.collectives[collective] += 1

    # -- entering and leaving -----------------------------------------------------------------------

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Operations in this block are not this rank's work (sharding propagation, say)."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def watching(self) -> Iterator[Tracker]:
        """Track everything in this block."""
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        def muted_propagation(*args: Any, **kwargs: Any) -> Any:
            with self.muted():
                return propagate(*args, **kwargs)

        torch.UntypedStorage.resize_ = watched_resize  # type: ignore[method-assign, assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = muted_propagation  # type: ignore[method-assign]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
            self._tick()


def axis_names(axes: Mapping[str, dist.ProcessGroup]) -> dict[str, str]:
    """Process-group name to mesh axis. Where one group serves several axes, the first named axis wins."""
    names: dict[str, str] = {}
    for axis, group in axes.items():
        names.setdefault(group.group_name, axis)
    return names
