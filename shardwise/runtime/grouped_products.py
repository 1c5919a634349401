"""Products of groups of rows, each with a matrix of its own, by torch's ``grouped_mm``: the experts of a mixture.

    rows [n, i], sorted by group; weights [groups, o, i]; ends [groups], the row after the last one of each group
    out [n, o]: out[j] = weights[g] rows[j]

The kernel neither reads nor writes the rows after ``ends[-1]``: those of the result, and of the gradient of ``rows``,
are not initialised. Gradients of the weights of a group without rows are zero.

It reads rows in vectors of 16 bytes, of fp32 or 16-bit numbers. fp64 and other widths have no kernel, nor has a
compiled block but in bf16.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.compiled import is_traced

VECTOR_BYTES = 16
"""Bytes: the kernel reads rows in vectors of this size."""


def has_grouped_products(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel takes weights of this dtype and of these widths; inductor knows it in bf16 alone."""
    if is_traced() and any(w.dtype != torch.bfloat16 for w in weights):
        return False
    aligned = all(size * w.element_size() % VECTOR_BYTES == 0 for w in weights for size in w.shape[1:])
    return aligned and all(w.dtype != torch.float64 for w in weights)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[n, o] from rows [n, i], weights [groups, o, i] and int32 ends [groups]."""
    return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


@cache
def plan_grouped_products() -> torch.library.Library:
    """Let fake tensors of every dtype pass ``aten._grouped_mm``, as its kernels do since torch 2.10.

    torch's own rule for fake tensors refuses all dtypes but bf16. The library keeps its kernel while it lives.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        library.impl("_grouped_mm", _result, "Meta", allow_override=True)
    return library


def _result(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result's shape. Groups divide the rows of ``left``, the columns of ``right``, or what both sum over."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape.insert(0, left.shape[0] if left.dim() == 3 or offs is None else offs.shape[0])
    return left.new_empty(shape, dtype=out_dtype or left.dtype)
