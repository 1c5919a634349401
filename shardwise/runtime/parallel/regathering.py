"""Column layers that save this rank's part of their input and all-gather the rest again in the backward pass.

Sibling layers share one all-gather, which overlaps with the product for the input's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.layer_replacement import take_over
from shardwise.runtime.parallel.tp_collectives import TPGroup


class RegatheredInput:
    """The input of sibling layers, all-gathered once in the backward pass."""

    def __init__(self, ranks: TPGroup) -> None:
        self._ranks = ranks
        self._layers = 0
        self._left = 0
        self._sent: Tensor | None = None
        self._whole: Tensor | None = None

    def used(self) -> None:
        self._layers += 1

    def begin(self, shard: Tensor) -> None:
        if self._sent is None and self._whole is None:
            self._sent = self._ranks.start_all_gather(shard)
            self._left = self._layers

    def take(self) -> Tensor:
        if self._whole is None:
            assert self._sent is not None
            self._whole = self._ranks.finish_all_gather(self._sent)
            self._sent = None
        whole = self._whole
        self._left -= 1
        if self._left == 0:
            self._whole = None
        return whole


class _RegatheringProduct(torch.autograd.Function):
    """entered [..., s, h] times weight [o, h]; saves the local shard [..., s / ranks, h] instead of ``entered``."""

    @staticmethod
    def forward(
        ctx: Any, entered: Tensor, shard: Tensor, weight: Tensor, regathered: RegatheredInput
    ) -> Tensor:
        ctx.save_for_backward(shard, weight)
        ctx.regathered = regathered
        if ctx.needs_input_grad[2]:
            regathered.used()
        return nn.functional.linear(entered, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        shard, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[2]:
            return grads[0] @ weight, None, None, None
        ctx.regathered.begin(shard)  # overlaps with the next product
        to_entered = grads[0] @ weight
        to_weight = grads[0].flatten(0, -2).t() @ ctx.regathered.take().flatten(0, -2)
        return to_entered, None, to_weight, None


class RegatheringLinear(nn.Linear):
    """A column layer that saves its input's local shard and all-gathers it again in the backward pass."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        take_over(self, layer)
        self.train(layer.training)

    def forward(self, entered: Tensor, shard: Tensor, regathered: RegatheredInput) -> Tensor:  # type: ignore[override]
        out: Tensor = _RegatheringProduct.apply(entered, shard, self.weight, regathered)
        return out if self.bias is None else out + self.bias
