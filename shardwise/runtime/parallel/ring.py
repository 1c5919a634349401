"""Ring attention for context parallelism: queries stay on their rank; keys and values circulate (Liu et al. 2023,
arXiv:2310.01889).

A rank computes attention to its current keys while it receives the next ones, and merges partial results by their
log-sum-exp, in fp32 (fp64 for fp64). In the backward pass keys and values circulate again, and their gradients follow
one step later. So a rank holds two blocks of keys and values, whatever the sequence length.

Causal attention is load-balanced: of 2n chunks rank r has chunks r and 2n-1-r. All its queries attend to the first
chunk of an earlier rank's keys; its second chunk attends to both chunks of a later rank's keys. So every rank computes
half the products of a full block in each step.

With n ranks, s/n tokens per rank and k key/value heads of width d, each rank sends n-1 blocks of 2 s/n k d elements in
the forward pass, the same in the backward pass, and n-1 blocks of gradients in fp32 or wider. The gradient of a rank's
own block is not sent.

The ring is one dispatcher operator. Activation checkpointing that keeps attention (``selective``, ``budget``) saves the
merged result, so recomputation sends nothing. The dry run decomposes the operator.

Refused: torch's ``context_parallel``, which is experimental, has no CPU kernel and puts DTensors between the model and
its attention; all-gathering keys and values, which holds them for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.runtime.accumulation import accumulation_dtype
from shardwise.runtime.parallel.attention_kernels import kernels_for, padding_for
from shardwise.runtime.torch_private import group_named


def ring_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of this rank's tokens to all tokens of the group. q [b, a, s/n, d]; k, v [b, k, s/n, d].

    Raises RecipeError if keys and values have different widths: they are sent as one tensor.
    """
    if k.shape != v.shape:
        raise RecipeError(
            "ring attention does not support this model",
            where="strategy.sequence_method",
            why=f"its keys have {k.shape[-1]} channels and its values {v.shape[-1]}",
            fix="set it to ulysses",
        )
    width = q.shape[-1]
    if pad := padding_for(q):
        q, k, v = (F.pad(x, (0, pad)) for x in (q, k, v))
    out: Tensor = _Ring.apply(q, k, v, scale, group.group_name)
    return out[..., :width] if pad else out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, group: str) -> Tensor:
        out, logarithms = torch.ops.shardwise.ring_attention(q, k, v, scale, group)
        ctx.save_for_backward(q, k, v, out, logarithms)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = torch.ops.shardwise.ring_attention_backward(
            grads[0], *ctx.saved_tensors, ctx.scale, ctx.group
        )
        return dq, dk, dv, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, group_name: str) -> tuple[Tensor, Tensor]:
    group, kernels = group_named(group_name), kernels_for(q)
    rank = dist.get_rank(group)
    ranks = group.size()
    half = q.shape[2] // 2
    here = torch.stack((k, v))  # [2, b, k, s/n, d]
    coming = _RingTransfer(here, group)
    out, logarithms = kernels.forward(q, k, v, True, scale)
    out = out.to(accumulation_dtype(q.dtype))
    logarithms = logarithms.contiguous()
    for step in range(1, ranks):
        here = coming.wait()
        if step + 1 < ranks:
            coming = _RingTransfer(here, group)
        keys, values = here
        if step <= rank:  # these keys come from an earlier rank
            more = kernels.forward(q, keys[:, :, :half], values[:, :, :half], False, scale)
            _merge(out, logarithms, *more)
        else:
            more = kernels.forward(q[:, :, half:], keys, values, False, scale)
            _merge(out[:, :, half:], logarithms[:, :, half:], *more)
        del more, keys, values
    return out.to(q.dtype), logarithms


def _merge(out: Tensor, logarithms: Tensor, more: Tensor, more_logarithms: Tensor) -> None:
    """Merge attention over more keys into ``out`` and ``logarithms``, in place."""
    # exp(more) / (exp(more) + exp(own)), without exponentials that overflow.
    share = torch.sigmoid(more_logarithms - logarithms).unsqueeze(-1)
    out.lerp_(more.to(out.dtype), share)
    logarithms.copy_(torch.logaddexp(logarithms, more_logarithms))


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    scale: float,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    group = group_named(group_name)
    kernels = kernels_for(q)
    wide = accumulation_dtype(q.dtype)
    rank = dist.get_rank(group)
    ranks = group.size()
    half = q.shape[2] // 2
    here = torch.stack((k, v))
    coming = _RingTransfer(here, group)
    dq, *own = kernels.backward(gradient, q, k, v, out, logarithms, causal=True, scale=scale)
    dq = dq.to(wide)
    at_home = torch.stack(own).to(wide)
    del own
    later = [x[:, :, half:] for x in (gradient, q, out, logarithms)]
    behind: _RingTransfer | None = None  # the partial gradients of the current block
    for step in range(1, ranks):
        here = coming.wait()
        if step + 1 < ranks:
            coming = _RingTransfer(here, group)
        if step <= rank:
            first = here[:, :, :, :half]
            more = kernels.backward(gradient, q, *first, out, logarithms, causal=False, scale=scale)
        else:
            more = kernels.backward(*later[:2], *here, *later[2:], causal=False, scale=scale)
        # Only now, so that the transfer overlaps with the products.
        sums = torch.zeros_like(here, dtype=wide) if behind is None else behind.wait()
        if step <= rank:
            dq += more[0]
            _add_parts(sums[:, :, :, :half], more[1:])
        else:
            dq[:, :, half:] += more[0]
            _add_parts(sums, more[1:])
        del more
        behind = _RingTransfer(sums, group)
    if behind is not None:
        at_home += behind.wait()
    dk, dv = at_home.to(q.dtype)
    return dq.to(q.dtype), dk, dv


def _add_parts(sums: Tensor, more: tuple[Tensor, ...]) -> None:
    for total, part in zip(sums, more, strict=True):
        total += part


class _RingTransfer:
    """Sends a tensor to the next rank and receives one from the previous rank."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        ranks = group.size()
        self._sent = sent
        self._arriving = torch.empty_like(sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % ranks),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        del self._sent
        return self._arriving


DECOMPOSITIONS: Mapping[str, Callable[..., Any]] = {
    "ring_attention": _forward,
    "ring_attention_backward": _backward,
}
"""Decomposition of the operators of the namespace ``shardwise``, for the dry run."""

_RING_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")  # lives as long as the process
_RING_LIBRARY.define(
    "ring_attention(Tensor q, Tensor k, Tensor v, float scale, str group) -> (Tensor, Tensor)"
)
_RING_LIBRARY.define(
    "ring_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logarithms,"
    " float scale, str group) -> (Tensor, Tensor, Tensor)"
)
for _name, _function in DECOMPOSITIONS.items():
    _RING_LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("shardwise::ring_attention", lib=_RING_LIBRARY)
def _traced_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, group_name: str) -> tuple[Tensor, Tensor]:
    """Results of a compiled block's trace: no rank sends anything in it."""
    out, logarithms = kernels_for(q).forward(q, k, v, True, scale)
    return torch.empty_like(out, dtype=q.dtype), logarithms.contiguous()


@torch.library.register_fake("shardwise::ring_attention_backward", lib=_RING_LIBRARY)
def _traced_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    scale: float,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, *_ = kernels_for(q).backward(gradient, q, k, v, out, logarithms, causal=True, scale=scale)
    dk, dv = torch.empty_like(torch.stack((k, v)))
    return dq, dk, dv
