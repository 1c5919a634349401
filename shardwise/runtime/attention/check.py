"""Compares an attention backend with the scores formed explicitly in fp64: output, and gradients of q, k and v.

The head widths and grouping are those of the run, and so are the lengths, but for a whole number of tiles in long
sequences. Two groups of heads and one sample are enough: kernels
compute heads apart. Some queries score far below 0 with all keys. Kernels subtract the log-sum-exp within an
exponential, which overflows for such rows if keys beyond the end of a tile count as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from shardwise.runtime.attention.backend import MATH, SDPA_BACKENDS, AttentionCall
from shardwise.runtime.kernel_check import KernelCheck, row_error
from shardwise.runtime.torch_private_attention import attention_by_default

MAX_TOKENS = 1024
"""Lengths beyond are checked with this many tokens and their remainder by 128, the largest tile."""
_ROWS = 256
"""Most queries that are compared: each costs as many scores as there are keys."""
_LOW_SCORE = -120.0
"""Below the logarithm of the least fp32 number, -103."""


@contextmanager
def only_backends(names: Sequence[str]) -> Iterator[None]:
    """In this block PyTorch chooses among these backends, in their order."""
    with sdpa_kernel([SDPA_BACKENDS[name] for name in names], set_priority=True):
        yield


def check_of(call: AttentionCall, device: torch.device, names: Sequence[str]) -> KernelCheck:
    """The check of the first of ``names``; PyTorch may take a later one where it knows that the first cannot run."""
    shown = _shortened_call(call)
    grouping = f"{call.heads // call.kv_heads} queries a key head"
    mask = "dense mask" if call.masked else "causal" if call.causal else "no mask"
    dtype = str(call.dtype).removeprefix("torch.")
    shape = f"{dtype}, {shown.queries} x {shown.keys} tokens, head width {call.width}, {grouping}, {mask}"
    if call.value_width != call.width:
        shape += f", value width {call.value_width}"
    return KernelCheck(
        f"{names[0]} attention", shape, device, call.dtype, lambda: attention_error(shown, device, names)
    )


def _shortened_call(call: AttentionCall) -> AttentionCall:
    """Two groups of heads, and at most MAX_TOKENS tokens with the remainder of the length."""

    def length(tokens: int) -> int:
        return tokens if tokens <= MAX_TOKENS else MAX_TOKENS + tokens % 128

    group = max(1, call.heads // call.kv_heads)
    return replace(
        call, heads=2 * group, kv_heads=2, queries=length(call.queries), keys=length(call.keys), dropout=False
    )


def attention_error(call: AttentionCall, device: torch.device, names: Sequence[str]) -> float:
    """The largest error of a row of the output or of a gradient, relative to its norm."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (tensor.requires_grad_() for tensor in _random_qkv(call, generator))
    rows = _compared_rows(call.queries, device)
    # Zero for the queries that are not compared: gradients of keys and values then need no others.
    slope = torch.zeros(1, call.heads, call.queries, call.value_width, dtype=call.dtype, device=device)
    shape = (*slope.shape[:2], len(rows), call.value_width)
    slope[:, :, rows] = torch.randn(shape, generator=generator, device=device).to(call.dtype)
    mask = _seen_keys(call, device)
    with torch.enable_grad():
        with only_backends((*names, MATH)):
            additive = None if mask is None or not call.masked else _additive(mask, call.dtype)
            out = attention_by_default(
                q,
                k,
                v,
                additive,
                0.0,
                call.causal and not call.masked,
                scale=None,
                enable_gqa=call.heads != call.kv_heads,
            )
            gradients = torch.autograd.grad(out, (q, k, v), slope)
        wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        expected = _explicit(wide[0], wide[1], wide[2], rows, None if mask is None else mask[rows])
        references = torch.autograd.grad(expected, wide, slope[:, :, rows].double())
    results = [tensor.detach() for tensor in (out, *gradients)]
    if not all(bool(tensor.isfinite().all()) for tensor in results):
        return math.nan
    # Gradients along the direction of low scores are sums of large terms that cancel.
    parts = [results[0][:, :, rows], *(gradient[..., 1:] for gradient in results[1:3]), results[3]]
    wanted = [expected.detach(), *(gradient[..., 1:] for gradient in references[:2]), references[2]]
    return max(row_error(*pair) for pair in zip(parts, wanted, strict=True))


def _random_qkv(call: AttentionCall, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [1, a, s, d], k and v [1, k, t, d], laid out as projections are: [1, s, a, d] in memory.

    All keys have one component along a direction, and every fourth query points against it.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    q = normal(1, call.queries, call.heads, call.width)
    k = normal(1, call.keys, call.kv_heads, call.width)
    v = normal(1, call.keys, call.kv_heads, call.value_width)
    along = torch.zeros(call.width, device=generator.device)
    along[0] = 1.0
    k[..., 0] = 4.0
    q[:, ::4] = along * (_LOW_SCORE * math.sqrt(call.width) / 4.0)  # scores are divided by √d
    q, k, v = (x.to(call.dtype).transpose(1, 2) for x in (q, k, v))
    return q, k, v


def _compared_rows(queries: int, device: torch.device) -> Tensor:
    """All queries, or some at equal distances and the last 128."""
    if queries <= _ROWS:
        return torch.arange(queries, device=device)
    spread = torch.arange(0, queries - 128, -(-queries // (_ROWS - 128)), device=device)
    return torch.cat((spread, torch.arange(queries - 128, queries, device=device)))


def _seen_keys(call: AttentionCall, device: torch.device) -> Tensor | None:
    """Which key a query sees, [s, t]; None for all.

    PyTorch's causal mask begins at the first key, whatever the lengths. A dense one shows every query some key: more
    queries than keys, as in cross-attention, leave none out.
    """
    if not (call.causal or call.masked):
        return None
    first = max(call.keys - call.queries, 0) if call.masked else 0
    return torch.ones(call.queries, call.keys, dtype=torch.bool, device=device).tril(first)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def _explicit(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, seen: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √d) v for some queries."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q[:, :, rows] @ k.mT / math.sqrt(q.shape[-1])
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v
