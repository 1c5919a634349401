"""Copies of a run in host memory, to go back to when training has gone wrong.

There are two, and the older is overwritten: a fault shows itself some steps after it happened, so the newest
copy may already hold it. Buffers are made once, with the run, and both are written at once, so the memory they
take is taken when the peak is measured, and the dry run makes them too: on the CPU the host's memory is the device's.
On CUDA they are pinned and copied without waiting.

Every rank copies the pieces that it holds: no message, whatever divides the model. Refused: a copy on another
rank, which would survive the loss of a node; that is what checkpoints are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shardwise.engine.build import Run
from shardwise.engine.persistent import tensors_of
from shardwise.model.host import host_empty_like
from shardwise.model.slices import local_part

T = TypeVar("T")

COPIES = 2


class Snapshots(Generic[T]):
    """The last copies of a run, each with what the trainer knew then."""

    def __init__(self, run: Run) -> None:
        self._run = run
        pieces = _pieces(run)
        self._buffers = [_host_buffers(pieces) for _ in range(COPIES)]
        self._labels: list[T | None] = [None] * COPIES
        self._next = 0

    @property
    def buffers(self) -> list[Tensor]:
        """All that is held, for whoever counts it."""
        return [tensor for buffers in self._buffers for tensor in buffers.values()]

    def begin(self, label: T) -> None:
        """Write every copy: there is something to go back to from the first step on."""
        for _ in range(COPIES):
            self.take(label)

    def take(self, label: T) -> None:
        """Overwrite the older copy with the run as it is."""
        _copy(_pieces(self._run), self._buffers[self._next])
        self._labels[self._next] = label
        self._next = (self._next + 1) % COPIES

    def newest(self, usable: Callable[[T], bool]) -> T | None:
        """What was known at the newest copy that is ``usable``; None when none is."""
        index = self._newest(usable)
        return None if index is None else self._labels[index]

    def restore(self, usable: Callable[[T], bool]) -> T:
        """Write the newest copy that is ``usable`` back into the run. A newer one is of no use any more."""
        index = self._newest(usable)
        assert index is not None, "asked for first"
        label = self._labels[index]
        assert label is not None
        _copy(self._buffers[index], _pieces(self._run))
        for other in range(COPIES):
            if other != index and not self._kept(other, usable):
                self._labels[other] = None
        self._next = (index + 1) % COPIES
        return label

    def _newest(self, usable: Callable[[T], bool]) -> int | None:
        for back in range(1, COPIES + 1):
            index = (self._next - back) % COPIES
            if self._kept(index, usable):
                return index
        return None

    def _kept(self, index: int, usable: Callable[[T], bool]) -> bool:
        label = self._labels[index]
        return label is not None and usable(label)


def snapshots_of(run: Run) -> Snapshots[T] | None:
    """The snapshots that the recipe asks for."""
    return None if run.recipe.guard.snapshot_every is None else Snapshots(run)


def _pieces(run: Run) -> dict[str, Tensor]:
    return {name: local_part(tensor) for name, tensor in tensors_of(run).items()}


def _host_buffers(pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: host_empty_like(piece) for name, piece in pieces.items()}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Everything, in the order of the device's own work."""
    for name, piece in target.items():
        piece.copy_(source[name], non_blocking=True)
