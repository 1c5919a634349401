"""Rows for the experts that tokens go to, and the sums of a token's rows. Each is the other's gradient.

    source [n]    the token of each row
    row [t, k]    the rows of each token; n for a choice that has no row

Both are written out, because autograd's own gradient of an index adds with atomics, in any order. ``exchange`` sends
rows to other ranks and is its own gradient. Indices are saved tensors, so recomputed blocks do not keep them.

Legend: t tokens, k experts of a token, n rows, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[[Tensor], Tensor]


def rows_of(tokens: Tensor, source: Tensor, row: Tensor, exchange: Exchange | None = None) -> Tensor:
    """The rows [n, d] of tokens [t, d], after ``exchange``."""
    out: Tensor = _TokenRows.apply(tokens, source, row, exchange or _here)
    return out


def sums_of(rows: Tensor, source: Tensor, row: Tensor, exchange: Exchange | None = None) -> Tensor:
    """The sums [t, d] of each token's rows [n, d], after ``exchange``."""
    out: Tensor = _RowSums.apply(rows, source, row, exchange or _here)
    return out


class _TokenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, row: Tensor, exchange: Exchange) -> Tensor:
        ctx.save_for_backward(row)
        ctx.exchange = exchange
        return exchange(tokens.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (row,) = ctx.saved_tensors
        return _added(ctx.exchange(grads[0]), row), None, None, None


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, row: Tensor, exchange: Exchange) -> Tensor:
        ctx.save_for_backward(source)
        ctx.exchange = exchange
        return _added(exchange(rows), row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return ctx.exchange(grads[0].index_select(0, source)), None, None, None


def _added(rows: Tensor, row: Tensor) -> Tensor:
    """The sum of each token's rows, in the order of its choices."""
    missing = row == rows.shape[0]
    chosen = rows.index_select(0, row.masked_fill(missing, 0).flatten()).unflatten(0, row.shape)  # [t, k, d]
    return chosen.masked_fill_(missing.unsqueeze(-1), 0.0).sum(1)


def _here(rows: Tensor) -> Tensor:
    return rows
