"""Weight stashing: weights of earlier steps, for the micro-batches that began with them.

An asynchronous pipeline updates a stage's weights while micro-batches are in flight. The backward pass of each needs
the weights of its forward pass (Harlap et al. 2018, arXiv:1806.03377, section 3.3). The model holds the newest weights.
Older ones are in buffers, allocated with the run, as many as are ever needed at once. A pass that needs them swaps them
with the model's, tensor by tensor, and swaps them back afterwards.

A version is the number of updates before it. Of M micro-batches per step, micro-batch m (from the first of the run)
uses version max(0, m - lag) // M. ``lag`` is the number of micro-batches by which a forward pass is ahead of the rank's
next backward pass: of the stage itself, or with vertical sync of the first stage, so that all stages use the same
version.

Swapping values works with any technique that gathers and casts weights. Refused: to point the model to other storages
for a pass, because FSDP2 keeps views of its shards in several places. The price is three copies of a stage's shard for
each pass with old weights. A swap allocates nothing, so out of memory in a pass leaves the weights whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.runtime.parallel.shard_slices import local_part


class Stash:
    """Older versions of some parameters. ``lag`` and ``per_step`` are in micro-batches."""

    def __init__(self, parameters: Sequence[nn.Parameter], lag: int, per_step: int) -> None:
        self._live = parameters
        self._lag = lag
        self._per_step = per_step
        # ``lag`` micro-batches in flight began in at most ceil(lag / per_step) steps before this one.
        versions = -(-lag // per_step)
        self._free = [[torch.empty_like(local_part(p)) for p in parameters] for _ in range(versions)]
        largest = 0
        if self._free:
            largest = max((local_part(p).nbytes for p in parameters), default=0)
        # Bytes, which serve parameters of every dtype and shape.
        self._scratch = torch.empty(
            largest, dtype=torch.uint8, device=parameters[0].device if largest else None
        )
        self._kept: dict[int, list[Tensor]] = {}
        self.newest = 0

    @property
    def buffers(self) -> list[Tensor]:
        return [tensor for tensors in (*self._free, *self._kept.values()) for tensor in tensors]

    def version_of(self, micro_batch: int) -> int:
        return max(0, micro_batch - self._lag) // self._per_step

    @contextmanager
    def weights_of(self, micro_batch: int) -> Iterator[None]:
        """Within it the model has the weights that this micro-batch began with."""
        version = self.version_of(micro_batch)
        if version != self.newest:
            self._exchange(self._kept[version])
        try:
            yield
        finally:
            if version != self.newest:
                self._exchange(self._kept[version])

    @torch.no_grad()
    def before_update(self) -> None:
        """All passes of a step are done, and the weights are about to change."""
        done = (self.newest + 1) * self._per_step  # micro-batches whose backward passes are over
        # First free the versions that no micro-batch in flight uses: the copy below takes one of their buffers.
        for version in [v for v in self._kept if self._last_of(v) < done]:
            self._free.append(self._kept.pop(version))
        if self._last_of(self.newest) >= done:
            self._kept[self.newest] = self._free.pop()
            for kept, live in zip(self._kept[self.newest], self._live, strict=True):
                kept.copy_(local_part(live))
        self.newest += 1

    def _last_of(self, version: int) -> int:
        """The last micro-batch that uses a version."""
        return (version + 1) * self._per_step + self._lag - 1

    @torch.no_grad()
    def _exchange(self, others: Sequence[Tensor]) -> None:
        for live, other in zip(self._live, others, strict=True):
            scratch = self._scratch[: other.nbytes].view(other.dtype).view(other.shape)
            scratch.copy_(local_part(live))
            local_part(live).copy_(other)
            other.copy_(scratch)
