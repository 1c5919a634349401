"""Update rules that go through a parameter in chunks of rows: 16-bit weights, 8-bit moments.

A chunk is read into fp32, updated by torch's fused fp32 kernel, and written back in its stored form. So only a few
chunks of extra memory are needed. Tensors stored in fp32 are updated in place. Other tensors are written through the
skip verdict (``where``, not a product: 0 times NaN is NaN). bf16 weights are written with stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise.engine.optim.chunk import STEP, Chunk, as_rows, chunks
from shardwise.engine.optim.moment_storage import Moments
from shardwise.engine.optim.norm import gradient
from shardwise.engine.optim.optimizer import Rate, UpdateRule
from shardwise.engine.optim.rounding import random_bits, to_bf16
from shardwise.runtime.parallel.shard_slices import local_slices


@dataclass(frozen=True)
class ChunkedRule:
    """An fp32 ``rule`` over stored weights and moments called ``names``. ``seed`` seeds stochastic rounding."""

    rule: UpdateRule
    names: Sequence[str]
    moments: Moments
    seed: int

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = {STEP: torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for name in self.names:
            state.update(self.moments.state(parameter, name))
        return state

    def update(
        self,
        parameters: Sequence[nn.Parameter],
        states: Sequence[dict[str, Tensor]],
        rate: Rate,
        skip: Tensor,
    ) -> None:
        for parameter, state in zip(parameters, states, strict=True):
            state[STEP] += 1 - skip
            weights, grads = as_rows(parameter), gradient(parameter).view_as(as_rows(parameter))
            kept = {name: as_rows(moment) for name, moment in state.items() if name != STEP}
            for rows in chunks(*weights.shape):
                moments = {name: moment[rows] for name, moment in kept.items()}
                piece = Chunk(parameter, rows, weights[rows], grads[rows], moments, state[STEP])
                self.update_piece(piece, rate, skip)

    def update_piece(self, piece: Chunk, rate: Rate, skip: Tensor) -> None:
        untouched, stored = skip > 0, piece.weight
        wide = torch.promote_types(stored.dtype, torch.float32)
        moments = {name: self.moments.read(piece.state, name).to(wide) for name in self.names}
        read = replace(piece, weight=stored.to(wide), grad=piece.grad.to(wide), state=moments)
        self.rule.update_piece(read, rate, skip)
        for name, moment in moments.items():
            self.moments.write(piece.state, name, moment, untouched)
        if stored.dtype != wide:
            stored.copy_(torch.where(untouched, stored, self._narrow(read.weight, piece)))

    def _narrow(self, value: Tensor, piece: Chunk) -> Tensor:
        """fp32 values in the dtype of the weights."""
        if piece.weight.dtype != torch.bfloat16:
            return value.to(piece.weight.dtype)
        assert piece.step is not None, "in every state that is made here"
        seed = (piece.step.to(torch.int64) << 40) + self.seed * 1_000_003 % 2**62
        return to_bf16(value, random_bits(*_place(piece), seed))


def _place(piece: Chunk) -> tuple[Tensor, Tensor]:
    """Row and column indices of a chunk's elements in the whole parameter as [rows, rest], int64."""
    parameter, rows = piece.parameter, piece.rows
    first, *rest = local_slices(parameter) or (slice(0, 1),)
    device = piece.weight.device
    row = torch.arange(first.start + rows.start, first.start + rows.stop, device=device)
    column = torch.zeros(1, dtype=torch.int64, device=device)
    for span, size in zip(rest, parameter.shape[1:], strict=True):
        column = (column[:, None] * size + torch.arange(span.start, span.stop, device=device)).flatten()
    return row, column
