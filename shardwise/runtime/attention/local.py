"""Causal attention with a sliding window and with sinks, by the kernels of attention without them.

A query sees itself and the ``window - 1`` tokens before it. A sink is a learned logit of a head that joins the softmax
of every query and has no value (gpt-oss, OpenAI 2025, arXiv:2508.10925, section 2).

No kernel of PyTorch has sinks. Let l be the log-sum-exp of a query's scores and L = log(exp(l) + exp(sink)). Then the
output is exp(l - L) times that without the sink. The kernels' backward pass computes probabilities exp(score - l) and
the product of each row's output and gradient from the l and the output that it gets (FlashAttention, Dao et al. 2022,
appendix B.2). So it returns exact gradients if it gets L and the output with the sink. The gradient of the sink is
-exp(sink - L) times the same product.

Windows run in flash attention, on NVIDIA GPUs in 16 bits, once a comparison with fp64 has passed (kernel_check.py).
Elsewhere, and for packed documents, a mask is made for each call and not kept.

The operator is one of the dispatcher's, as that of ring attention: activation checkpointing that keeps attention keeps
its result, and the dry run decomposes it.

Legend: b batch, a heads, k key/value heads, s queries, t keys, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.accumulation import accumulation_dtype
from shardwise.runtime.documents import additive
from shardwise.runtime.kernel_check import KernelCheck, row_error, trusted
from shardwise.runtime.parallel.attention_kernels import (
    Kernels,
    WindowedFlash,
    has_varlen_kernel,
    kernels_for,
    padding_for,
    planned_kernels,
)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention [b, a, s, e] of q [b, a, s, d] to k [b, k, t, d] and v [b, k, t, e].

    Args:
        window: tokens that a query sees; None for all.
        sinks: [a].
        mask: bool, [b or 1, 1, s, t], true where a query sees a key, in place of the causal one; required if s is not
            t. The window applies, too, if s is t.
    """
    length, width = v.shape[2:]
    limit = window if window is not None and window < length == q.shape[2] else 0
    widest = q if q.shape[-1] > width else v
    wide = widest.shape[-1] + padding_for(widest)
    q, k, v = (x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    out: Tensor = _LocalAttention.apply(q, k, v, sinks, mask, scale, limit)
    return out if width == wide else out[..., :width]


class _LocalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        scale: float,
        window: int,
    ) -> Tensor:
        out, logarithms = torch.ops.shardwise.local_attention(q, k, v, sinks, mask, scale, window)
        ctx.save_for_backward(q, k, v, out, logarithms, sinks, mask)
        ctx.scale, ctx.window = scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logarithms, sinks, mask = ctx.saved_tensors
        dq, dk, dv = torch.ops.shardwise.local_attention_backward(
            grads[0], q, k, v, out, logarithms, mask, ctx.scale, ctx.window
        )
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(logarithms.dtype).unsqueeze(-1) - logarithms).exp()
            products = (grads[0] * out).sum(-1, dtype=accumulation_dtype(out.dtype))
            of_sinks = -(share * products).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, of_sinks, None, None, None


def _attend_locally(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    kernels, causal = _kernels_of(q, k, mask, window)
    out, logarithms = kernels.forward(q, k, v, causal, scale)
    if sinks is None:
        return out, logarithms.contiguous()
    whole = torch.logaddexp(logarithms, sinks.to(logarithms.dtype).unsqueeze(-1))
    return out.mul_((logarithms - whole).exp_().unsqueeze(-1)), whole


def _local_gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    mask: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels, causal = _kernels_of(q, k, mask, window)
    return kernels.backward(gradient, q, k, v, out, logarithms, causal=causal, scale=scale)


def _kernels_of(q: Tensor, k: Tensor, mask: Tensor | None, window: int) -> tuple[Kernels, bool]:
    """The kernels, and whether they apply the causal mask themselves."""
    if mask is None and not window:
        return kernels_for(q), True
    if mask is None and _runs_windows(q):
        return WindowedFlash(window), True
    seen = seen_keys(q.shape[2], window, q.device) if window else None
    if mask is not None:
        seen = mask if seen is None else mask & seen
    assert seen is not None
    return kernels_for(q, additive(seen, q.dtype)), False


def seen_keys(length: int, window: int, device: torch.device) -> Tensor:
    """Bool [s, s]: the last ``window`` keys up to each query's own."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def _runs_windows(q: Tensor) -> bool:
    """Whether flash attention has windows on the device of ``q``, or the planned one, and computes what fp64 does."""
    if not has_varlen_kernel(q, q.shape[-1]):
        return False
    return planned_kernels() is not None or _trusts_windows(q.dtype, q.shape[-1], q.device)


@cache
def _trusts_windows(dtype: torch.dtype, width: int, device: torch.device) -> bool:
    shape = f"{str(dtype).removeprefix('torch.')}, sliding windows and sinks, head width {width}"
    return trusted(
        KernelCheck("flash attention", shape, device, dtype, partial(_window_error, dtype, width, device))
    )


def _window_error(dtype: torch.dtype, width: int, device: torch.device) -> float:
    """The largest error of a row of the output or of a gradient, for windows around the size of a tile."""
    generator = torch.Generator(device).manual_seed(0)
    length = 320
    shapes = [(1, heads, length, width) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    gradient = torch.randn(q.shape, generator=generator, device=device).to(dtype)
    sinks = torch.randn(4, generator=generator, device=device)
    errors = []
    for window in (1, 64, 130):
        kernels = WindowedFlash(window)
        out, logarithms = kernels.forward(q, k, v, True, width**-0.5)
        whole = torch.logaddexp(logarithms, sinks.unsqueeze(-1))
        out = out * (logarithms - whole).exp().unsqueeze(-1).to(dtype)
        results = kernels.backward(gradient, q, k, v, out, whole, causal=True, scale=width**-0.5)
        expected = _in_fp64(q, k, v, sinks, window, gradient)
        pairs = zip((out, *results), expected, strict=True)
        errors += [row_error(result, reference) for result, reference in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _in_fp64(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int, gradient: Tensor
) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v, from a softmax with one more column."""
    heads = [x.double().requires_grad_() for x in (q, k, v)]
    shared = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(shared, 1) for x in heads[1:])
    with torch.enable_grad():
        scores = heads[0] @ wide_k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen_keys(q.shape[2], window, q.device), -torch.inf)
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        out = torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ wide_v
        gradients = torch.autograd.grad(out, heads, gradient.double())
    return out.detach(), *gradients


LOCAL_PARTS: Mapping[str, Callable[..., Any]] = {
    "local_attention": _attend_locally,
    "local_attention_backward": _local_gradients,
}
"""Decomposition of the operators of the namespace ``shardwise``, for the dry run."""

_LOCAL_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")  # lives as long as the process
_LOCAL_LIBRARY.define(
    "local_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? mask, float scale, int window)"
    " -> (Tensor, Tensor)"
)
_LOCAL_LIBRARY.define(
    "local_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logarithms,"
    " Tensor? mask, float scale, int window) -> (Tensor, Tensor, Tensor)"
)
for _name, _function in LOCAL_PARTS.items():
    _LOCAL_LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwise::{_name}", _function, lib=_LOCAL_LIBRARY)
