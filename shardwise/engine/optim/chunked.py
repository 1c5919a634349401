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

from shardwise.engine.optim.chunk import STEP, Chunk, as_rows, widened_rows
from shardwise.engine.optim.moment_storage import Moments
from shardwise.engine.optim.optimizer import Rate, UpdateRule
from shardwise.engine.optim.rounding import Keys, position_keys, random_bits, to_bf16
from shardwise.runtime.accumulation import accumulation_dtype
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
        untouched = skip > 0
        for chunk in chunks:
            step = chunk.state[STEP]
            weights = as_rows(chunk.weight)  # [rows, rest], as the gradient and the moments
            grads = chunk.grad.view_as(weights)
            moments = {name: as_rows(moment) for name, moment in chunk.state.items() if name != STEP}
            keys = self._position_keys(chunk, weights) if weights.dtype == torch.bfloat16 else None
            for rows in widened_rows(weights):
                state = {STEP: step, **{name: moment[rows] for name, moment in moments.items()}}
                first = chunk.first + rows.start  # in the local shard
                stored = weights[rows]
                read = self._updated(Chunk(chunk.parameter, first, stored, grads[rows], state), rate, skip)
                for name in self.names:
                    self.moments.write(state, name, read.state[name], untouched)
                if read.weight is not stored:  # fp32 weights have been updated in place
                    narrow = read.weight.to(stored.dtype)
                    if keys is not None:
                        narrow = to_bf16(read.weight, random_bits(keys[0][rows], keys[1]))
                    stored.copy_(torch.where(untouched, stored, narrow))
            step += 1 - skip  # once for all rows

    def _updated(self, stored: Chunk, rate: Rate, skip: Tensor) -> Chunk:
        """The chunk in fp32, or wider where its weights are, after an update."""
        wide = accumulation_dtype(stored.weight.dtype)
        state = {name: self.moments.read(stored.state, name).to(wide) for name in self.names}
        state[STEP] = stored.state[STEP].clone()  # the rule counts up the clone
        read = replace(stored, weight=stored.weight.to(wide), grad=stored.grad.to(wide), state=state)
        self.rule.update([read], rate, skip)
        return read

    def _position_keys(self, chunk: Chunk, weights: Tensor) -> Keys:
        """Keys of the rows and columns of a chunk's weights [rows, rest]."""
        number = (chunk.state[STEP] + 1).to(torch.int64)
        # Steps are 2^40 apart, so no row or column has the key of one in another step.
        seed = (number << 40) + self.seed * 1_000_003 % 2**62
        rows = slice(chunk.first, chunk.first + weights.shape[0])
        return position_keys(*_positions(chunk.parameter, rows, weights.device), seed)


def _positions(parameter: Tensor, rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column indices, in the whole parameter, of rows [rows, rest] of the local shard, int64."""
    first, *rest = local_slices(parameter) or (slice(0, 1),)
    row = torch.arange(first.start + rows.start, first.start + rows.stop, device=device)
    # The further dims are flattened: the column of (i, j, k) is (i * size_j + j) * size_k + k, with the whole sizes.
    column = torch.zeros(1, dtype=torch.int64, device=device)
    for span, size in zip(rest, parameter.shape[1:], strict=True):
        column = (column[:, None] * size + torch.arange(span.start, span.stop, device=device)).flatten()
    return row, column
