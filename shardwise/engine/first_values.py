"""The trained values of the beginning of a run, kept so that the model can compute as it did before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine.optim.norm import local


class FirstValues:
    """Copies of this rank's shards of all trained parameters, in the same memory (device or host).

    Attributes:
        values: in the order of the model's parameters; undefined until ``keep``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._shards = [local(p) for p in model.parameters() if p.requires_grad]
        self.values = [torch.empty_like(shard) for shard in self._shards]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the present values."""
        for first, shard in zip(self.values, self._shards, strict=True):
            first.copy_(shard)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Within it the parameters have their first values."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """One parameter at a time, so that memory of the largest is enough. Gathered weights are let go."""
        for first, shard in zip(self.values, self._shards, strict=True):
            present = shard.clone()
            shard.copy_(first)
            first.copy_(present)
        # The shards have changed under weights that ZeRO 1 and 2 keep gathered: the next forward pass gathers anew.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
