"""Copies of a run in host memory: snapshots for a rewind after a fault, and the copy that a background save writes.

There are two snapshots, and a new one overwrites the older: a fault shows some steps after it happened, so the newest
snapshot may already contain it. All buffers are allocated once, before the first step, and are written then. So
the measured peak includes them, and the dry run allocates them too: on the CPU, host memory is device memory. On CUDA
the buffers are pinned, and copies do not wait for the device.

Each rank copies its own shards, without communication. Refused: a copy on another rank, which would survive the loss of
a node; checkpoints do that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shardwise.engine.run import Run
from shardwise.engine.run_state import tensors_of
from shardwise.runtime.offload.host import host_empty_like
from shardwise.runtime.parallel.shard_slices import local_part

T = TypeVar("T")

HOST_COPIES = 2


class HostCopy:
    """One copy of this rank's shards in host memory, by tensor name."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.tensors = {name: host_empty_like(piece) for name, piece in _local_parts(run).items()}

    def take(self) -> None:
        """Copy the present run, ordered after the device's present work."""
        _copy(_local_parts(self._run), self.tensors)

    def restore(self) -> None:
        """Write the copy back into the run."""
        _copy(self.tensors, _local_parts(self._run))
        # Optimizers that keep derived state outside of their tensors read it again.
        self._run.optimizer.loaded()


class Snapshots(Generic[T]):
    """The last snapshots of a run, each with a label: the training state at that time."""

    def __init__(self, run: Run) -> None:
        self._copies = [HostCopy(run) for _ in range(HOST_COPIES)]
        # None: the copy is not written, or no longer usable.
        self._labels: list[T | None] = [None] * HOST_COPIES
        self._next = 0  # the copy that is overwritten next: the older one

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers, so that they can be counted."""
        return [tensor for copy in self._copies for tensor in copy.tensors.values()]

    def begin(self, label: T) -> None:
        """Write both copies, so that a rewind is possible from the first step on."""
        for _ in range(HOST_COPIES):
            self.take(label)

    def take(self, label: T) -> None:
        """Overwrite the older copy with the present run."""
        self._copies[self._next].take()
        self._labels[self._next] = label
        self._next = (self._next + 1) % HOST_COPIES

    def newest(self, usable: Callable[[T], bool]) -> T | None:
        """The label of the newest copy that is ``usable``; None without one."""
        index = self._newest(usable)
        return None if index is None else self._labels[index]

    def restore(self, usable: Callable[[T], bool]) -> T:
        """Write the newest ``usable`` copy back into the run and return its label. Newer copies are dropped."""
        index = self._newest(usable)
        assert index is not None, "asked for first"
        label = self._labels[index]
        assert label is not None
        self._copies[index].restore()
        # A newer copy is from after the fault: the run that it belongs to is undone.
        for other in range(HOST_COPIES):
            if other != index and not self._is_usable(other, usable):
                self._labels[other] = None
        self._next = (index + 1) % HOST_COPIES
        return label

    def _newest(self, usable: Callable[[T], bool]) -> int | None:
        for back in range(1, HOST_COPIES + 1):
            index = (self._next - back) % HOST_COPIES
            if self._is_usable(index, usable):
                return index
        return None

    def _is_usable(self, index: int, usable: Callable[[T], bool]) -> bool:
        label = self._labels[index]
        return label is not None and usable(label)


def snapshots_of(run: Run) -> Snapshots[T] | None:
    """The snapshots of ``guard.snapshot_every``; None if it is not set."""
    return None if run.recipe.guard.snapshot_every is None else Snapshots(run)


def save_copy_of(run: Run) -> HostCopy | None:
    """The copy that background saves write from; None unless ``checkpoint.background`` is set."""
    return HostCopy(run) if run.recipe.checkpoint.background else None


def host_copies(run: Run) -> list[Tensor]:
    """The buffers of all copies that a trainer of this run allocates; they live as long as the result."""
    buffers: list[Tensor] = []
    snapshots: Snapshots[None] | None = snapshots_of(run)
    if snapshots is not None:
        buffers += snapshots.buffers
    save_copy = save_copy_of(run)
    if save_copy is not None:
        buffers += save_copy.tensors.values()
    return buffers


def _local_parts(run: Run) -> dict[str, Tensor]:
    return {name: local_part(tensor) for name, tensor in tensors_of(run).items()}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    # From the device to pinned memory this returns at once; the stream orders it before the next step's kernels.
    for name, piece in target.items():
        piece.copy_(source[name], non_blocking=True)
