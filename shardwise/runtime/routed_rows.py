"""Rows for the experts that tokens go to, and the sums of a token's rows. Each is the other's gradient.

    source [n]    the token of each row
    row [t, k]    the rows of each token; n for a choice that has no row

Both are written out, because autograd's own gradient of an index adds with atomics, in any order. ``exchange`` sends
rows to other ranks and is its own gradient. Indices are saved tensors, so recomputed blocks do not keep them.

Sums are those of an embedding bag, whose forward pass reads each row once and adds in order. Refused: a gather
[t, k, d] and its sum, which takes t k / n times the memory of the rows where most choices have none.

Legend: t tokens, k experts of a token, n rows, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RowExchange = Callable[[Tensor], Tensor]

_BAG = 64
"""Unused rows that one bag sums: a thread adds the rows of a bag one after the other."""


def rows_of(tokens: Tensor, source: Tensor, row: Tensor, exchange: RowExchange | None = None) -> Tensor:
    """The rows [n, d] of tokens [t, d], after ``exchange``."""
    out: Tensor = _TokenRows.apply(tokens, source, row, exchange or _here)
    return out


def sums_of(rows: Tensor, source: Tensor, row: Tensor, exchange: RowExchange | None = None) -> Tensor:
    """The sums [t, d] of each token's rows [n, d], after ``exchange``."""
    out: Tensor = _RowSums.apply(rows, source, row, exchange or _here)
    return out


class _TokenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, row: Tensor, exchange: RowExchange) -> Tensor:
        ctx.save_for_backward(row)
        ctx.exchange = exchange
        return exchange(tokens.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (row,) = ctx.saved_tensors
        return _added(ctx.exchange(grads[0]), row), None, None, None


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, row: Tensor, exchange: RowExchange) -> Tensor:
        ctx.save_for_backward(source)
        ctx.exchange = exchange
        return _added(exchange(rows), row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return ctx.exchange(grads[0].index_select(0, source)), None, None, None


def _added(rows: Tensor, row: Tensor) -> Tensor:
    """The sum of each token's rows, in the order of its choices."""
    size = min(rows.shape[0], row.numel())
    present = (row < rows.shape[0]).flatten()
    before = F.pad(present.cumsum(0), (1, 0))
    listed = torch.zeros(size + 1, dtype=torch.int64, device=row.device)
    listed = listed.scatter(0, torch.where(present, before[:-1], size), row.flatten())[:size]
    # The bags of tokens end before the list does. Short ones take the rest of it, and nothing reads them.
    rest = before[-1] + torch.arange(0, size, _BAG, device=row.device)
    starts = torch.cat([before[: -1 : row.shape[1]], rest.clamp(max=size)])
    return F.embedding_bag(listed, rows, starts, mode="sum")[: row.shape[0]]


def _here(rows: Tensor) -> Tensor:
    return rows
