"""Products of tokens with the matrices of the experts that they go to.

    index [t, k]: the k experts of every token; its t · k rows are sorted by expert
    rows [n, i] and a stack of matrices [e, o, i] give [n, o]: a group of rows for each expert

``F.grouped_mm`` computes all groups at once, where it has a kernel (runtime/grouped_products.py). Elsewhere ``bmm``
computes the same with a copy of an expert's matrix for every row. Both are independent of the routing's values, so a
dry run runs them.

A rank may hold some of the experts only. Rows of other ranks' experts have the number of its experts as their index
and are the last ones. ``grouped_mm`` leaves their results, and their gradients, uninitialised: a NaN in them would
survive a factor of 0. So ``rows`` and ``present`` fill them with zeros, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.hardware.kinds import before_ampere
from shardwise.runtime.grouped_products import VECTOR_BYTES, grouped_product, has_grouped_products
from shardwise.runtime.quantized import StackPacking
from shardwise.runtime.routed_rows import rows_of, sums_of


@dataclass(frozen=True)
class RowGroups:
    """The rows of a batch of tokens, sorted by expert.

    Attributes:
        order: [n], the place of every row among (token, choice).
        experts: [n], the expert of every row; the last one for those of other ranks.
        ends: [e] int32, the end of every expert's rows.
        absent: [n, 1], the rows of other ranks' experts; None if this rank has all experts.
        choices: k, the experts of a token.
    """

    order: Tensor
    experts: Tensor
    ends: Tensor
    absent: Tensor | None
    choices: int

    @classmethod
    def of(cls, index: Tensor, count: int, partial: bool) -> RowGroups:
        """Those of ``index`` [t, k].

        Args:
            count: e, the experts of this rank. partial: whether other ranks have experts, too.
        """
        experts, order = torch.sort(index.reshape(-1), stable=True)
        numbers = torch.arange(count, device=index.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        absent = (experts >= count).unsqueeze(1) if partial else None
        return cls(order, experts.clamp(max=count - 1) if partial else experts, ends, absent, index.shape[1])

    def rows(self, tokens: Tensor) -> Tensor:
        """The rows [n, i] of tokens [t, i]."""
        return self.present(rows_of(tokens, self.order // self.choices, self._row))

    def present(self, rows: Tensor) -> Tensor:
        """The rows, with zeros for other ranks' experts."""
        return rows if self.absent is None else rows.masked_fill(self.absent, 0.0)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """The sum of every token's rows [n, o] with its routing weights [t, k], in one order; [t, o]."""
        weighted = rows * rows_of(weights.reshape(-1, 1), self.order, self._row.view(-1, 1))
        return sums_of(weighted, self.order // self.choices, self._row)

    @property
    def _row(self) -> Tensor:
        """The rows [t, k] of every token."""
        return self.order.argsort().view(-1, self.choices)


def grouped_linear(rows: Tensor, stack: Tensor, groups: RowGroups) -> Tensor:
    """Every row [i] times the transposed matrix [o, i] of its expert. ``stack`` is [e, o, i]; [n, o]."""
    rows = rows.to(stack.dtype)
    if _has_kernel(stack) and _has_kernel(rows):
        return grouped_product(rows, stack, groups.ends)
    # A sum over one entry is no view, as squeeze would be: callers add to the result in place.
    return torch.bmm(stack[groups.experts], rows.unsqueeze(2)).sum(2)


def grouped_low_rank(rows: Tensor, a: Tensor, b: Tensor, scale: float, groups: RowGroups) -> Tensor:
    """scale · B A x for every row x: A [e, r, i], B [e, o, r]. The rank is padded to whole vectors of the kernel."""
    missing = -a.shape[1] % (VECTOR_BYTES // a.element_size())
    if missing and a.dtype != torch.float64:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return grouped_linear(grouped_linear(rows, a, groups) * scale, b, groups)


def _has_kernel(tensor: Tensor) -> bool:
    """Whether the kernel multiplies rows of this size and dtype on this device."""
    return has_grouped_products((tensor,)) and not before_ampere(tensor.device)


class _PackedGroupedProduct(torch.autograd.Function):
    """``grouped_linear`` with a packed stack, which has no gradient. Saves the packed stack."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, packed: Tensor, how: StackPacking, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.how, ctx.groups = how, groups
        return grouped_linear(rows, how.unpack(packed, rows.dtype), groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (packed,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        stack = ctx.how.unpack(packed, grads[0].dtype)
        return grouped_linear(grads[0], stack.transpose(1, 2), ctx.groups), None, None, None


def packed_grouped_linear(rows: Tensor, packed: Tensor, how: StackPacking, groups: RowGroups) -> Tensor:
    """``grouped_linear`` with a packed stack, unpacked for this product and again for its gradient."""
    out: Tensor = _PackedGroupedProduct.apply(rows, packed, how, groups)
    return out
