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

from shardwise.engine.optim.chunk import STEP, Chunk, as_rows, row_slices
from shardwise.engine.optim.moment_storage import Moments
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

    def update(self, chunks: Sequence[Chunk], rate: Rate, skip: Tensor) -> None:
        for chunk in chunks:
            step, weights = chunk.state[STEP], as_rows(chunk.weight)
            grads = chunk.grad.view_as(weights)
            moments = {name: as_rows(moment) for name, moment in chunk.state.items() if name != STEP}
            for rows in row_slices(*weights.shape):
                state = {STEP: step, **{name: moment[rows] for name, moment in moments.items()}}
                first = chunk.first + rows.start
                self._update_rows(
                    Chunk(chunk.parameter, first, weights[rows], grads[rows], state), rate, skip
                )
            step += 1 - skip

    def _update_rows(self, chunk: Chunk, rate: Rate, skip: Tensor) -> None:
        untouched, stored = skip > 0, chunk.weight
        wide = torch.promote_types(stored.dtype, torch.float32)
        moments = {name: self.moments.read(chunk.state, name).to(wide) for name in self.names}
        state = {STEP: chunk.state[STEP].clone(), **moments}  # the rule counts up the clone
        read = replace(chunk, weight=stored.to(wide), grad=chunk.grad.to(wide), state=state)
        self.rule.update([read], rate, skip)
        for name, moment in moments.items():
            self.moments.write(chunk.state, name, moment, untouched)
        if stored.dtype != wide:
            stored.copy_(torch.where(untouched, stored, self._narrow(read.weight, chunk)))

    def _narrow(self, value: Tensor, chunk: Chunk) -> Tensor:
        """fp32 values in the dtype of the weights."""
        if chunk.weight.dtype != torch.bfloat16:
            return value.to(chunk.weight.dtype)
        number = (chunk.state[STEP] + 1).to(torch.int64)
        seed = (number << 40) + self.seed * 1_000_003 % 2**62
        return to_bf16(value, random_bits(*_place(chunk), seed))


def _place(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Row and column indices of a chunk's elements in the whole parameter as [rows, rest], int64."""
    parameter, rows = chunk.parameter, chunk.rows
    first, *rest = local_slices(parameter) or (slice(0, 1),)
    device = chunk.weight.device
    row = torch.arange(first.start + rows.start, first.start + rows.stop, device=device)
    column = torch.zeros(1, dtype=torch.int64, device=device)
    for span, size in zip(rest, parameter.shape[1:], strict=True):
        column = (column[:, None] * size + torch.arange(span.start, span.stop, device=device)).flatten()
    return row, column
