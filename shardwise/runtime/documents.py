"""Attention within packed documents: causal, and no token attends to another document of its row.

``Documents`` takes the place of ``attn_mask`` in ``scaled_dot_product_attention``, as ``torch.nn.attention.bias`` does
for other masks. It is built once per forward pass and has one of two forms:

    mask      additive, [b, 1, s, s] in the compute dtype, on any device. Kernels compute the masked part too, and
              keys and values of grouped heads are repeated
    offsets   cumulative sequence lengths (``cu_seqlens``) for flash attention's variable-length kernel, on NVIDIA GPUs
              in 16 bits. There is no mask, and the work falls with the lengths of documents

Before its first use in a process the kernel is compared with fp64 (kernel_check.py); where it is wrong, masks are used.
Offsets are computed from the starts that the data gives for each row, so nothing waits for the device. Rows have a
power of two of starts, enough for the row with the most documents: blocks compile for each number. The rest are empty
documents at the end of a row, for which the kernel's blocks return at once. The backward kernel allocates fp32 sums for
128 more tokens per document, empty ones too: 2 MiB per document at 4,096 channels, for one block at a time.

Refused: the kernel on ROCm, where empty documents were not checked.

Legend: b batch, a heads, k key/value heads, s sequence, d head width, n documents of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.runtime.kernel_check import KernelCheck, row_error, trusted
from shardwise.runtime.parallel.attention_kernels import has_varlen_kernel, padding_for, planned_kernels
from shardwise.runtime.torch_private_attention import (
    flash_attention_varlen,
)

_MOST_DOCUMENTS = 65_535
"""Documents of a micro-batch: the kernel's grid has one row of blocks for each."""
_RANKS_ATTRIBUTE = "sequence_ranks"


@dataclass(frozen=True, eq=False)
class Documents:
    """The packed documents of whole rows.

    Attributes:
        length: tokens of a row, of all context-parallel ranks.
        mask: additive, [b, 1, s, s].
        offsets: int32 [b n + 1], in the rows end to end; None where there is a mask.
    """

    length: int
    mask: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return NotImplemented
        return _document_attention(*args, **(kwargs or {}))


def documents_of(
    model: nn.Module, positions: Tensor, starts: Tensor | None, like: Tensor, head_width: int
) -> Documents:
    """The documents of a packed batch, in the form for the device and dtype of ``like``.

    Args:
        positions: [b, s], of this rank's tokens; every 0 begins a document.
        starts: see ``offsets``; None for a mask from the positions.
    """
    if starts is None or not _runs_varlen(like, head_width) or starts.numel() > _MOST_DOCUMENTS:
        mask = additive(same_document(model, positions, starts), like.dtype)
        return Documents(mask.shape[-1], mask)
    length = whole_length(model, positions)
    return Documents(length, offsets=offsets(starts, length))


def _runs_varlen(like: Tensor, head_width: int) -> bool:
    """Whether the kernel runs on the device of ``like``, or on the planned one, and computes what fp64 does here."""
    if not has_varlen_kernel(like, head_width):
        return False
    return planned_kernels() is not None or _trusts_varlen(like.dtype, head_width, like.device)


@cache
def _trusts_varlen(dtype: torch.dtype, head_width: int, device: torch.device) -> bool:
    shape = f"{str(dtype).removeprefix('torch.')}, packed documents, head width {head_width}"
    error = partial(_varlen_error, dtype, head_width, device)
    return trusted(KernelCheck("flash attention", shape, device, dtype, error))


def _varlen_error(dtype: torch.dtype, head_width: int, device: torch.device) -> float:
    """The largest error of a row of the output or of a gradient, over documents around the size of a tile."""
    generator = torch.Generator(device).manual_seed(0)
    length = 320
    shapes = ((1, number, length, head_width) for number in (4, 2, 2))
    drawn = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    q, k, v = heads = [tensor.requires_grad_() for tensor in drawn]
    starts = torch.tensor([[0, 64, 257, 258, length]], dtype=torch.int32, device=device)
    wide = [x.detach().double().requires_grad_() for x in heads]
    seen = same_document(nn.Module(), torch.zeros(1, length, device=device), starts)
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).mT * head_width**-0.5
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide[2].repeat_interleave(2, 1)
    slope = torch.randn(expected.shape, generator=generator, device=device).to(dtype)
    with torch.enable_grad():
        documents = Documents(length, offsets=offsets(starts, length))
        out = _document_attention(q, k, v, documents, enable_gqa=True)
        gradients = torch.autograd.grad(out, heads, slope)
    references = torch.autograd.grad(expected, wide, slope.double())
    pairs = zip((out, *gradients), (expected, *references), strict=True)
    errors = [row_error(result.detach(), reference.detach()) for result, reference in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def offsets(starts: Tensor, length: int) -> Tensor:
    """Cumulative sequence lengths, int32 [b n + 1], of rows laid end to end.

    Args:
        starts: int32 [b, n], where the documents of each row begin, ascending from 0. ``length`` stands for none.
    """
    rows = torch.arange(starts.shape[0], device=starts.device, dtype=torch.int32).unsqueeze(1)
    return F.pad((starts + rows * length).flatten(), (0, 1), value=starts.shape[0] * length)


def same_document(model: nn.Module, positions: Tensor, starts: Tensor | None = None) -> Tensor:
    """Boolean mask [b, 1, s, s] of whole rows: causal attention within a document. Arguments as of ``documents_of``."""
    if starts is None:
        begins = positions == 0
    else:
        shape = starts.shape[0], whole_length(model, positions) + 1
        marks = torch.zeros(shape, dtype=torch.bool, device=starts.device)
        begins = marks.scatter_(1, starts.long(), True)[:, :-1]
    document = begins.cumsum(-1)
    return (document.unsqueeze(-1) == document.unsqueeze(-2)).tril().unsqueeze(1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a boolean mask is true, else -inf; in the dtype of the queries, which kernels require."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def set_sequence_ranks(model: nn.Module, ranks: int) -> None:
    """Record that every rank has 1/``ranks`` of each row."""
    setattr(model, _RANKS_ATTRIBUTE, ranks)


def whole_length(model: nn.Module, positions: Tensor) -> int:
    """Tokens of a row, given the positions [b, s] of this rank's tokens."""
    return positions.shape[1] * int(getattr(model, _RANKS_ATTRIBUTE, 1))


def _document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Documents,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """q [b, a, s, d]; k, v [b, k, s, d]."""
    documents = attn_mask
    if documents.offsets is not None:
        return _varlen_attention(query, key, value, documents, dropout_p, scale or query.shape[-1] ** -0.5)
    if enable_gqa:  # CUDA's kernel with masks does not support grouped heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    mask = None if documents.mask is None else documents.mask.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout_p, scale=scale)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, dropout: float, scale: float
) -> Tensor:
    batch, _, length, width = query.shape
    if pad := padding_for(query):
        query, key, value = (F.pad(x, (0, pad)) for x in (query, key, value))
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [b s, heads, d]
    lengths = documents.offsets, documents.offsets, length, length
    out: Tensor = flash_attention_varlen(*rows, *lengths, dropout, True, False, scale=scale)[0]
    return out.unflatten(0, (batch, length)).transpose(1, 2)[..., :width]
