"""Ulysses: every rank attends to the whole sequence, with its share of the heads (Jacobs et al. 2023,
arXiv:2309.14509).

Before attention an all-to-all turns tokens of all heads into all tokens of a few heads, for queries, keys and values;
after it another turns the output back. Each moves s h / P elements per rank (of P ranks, for a sequence of s tokens
and a width of h): with fewer key/value heads than query heads, those of keys and values less. Attention itself is one
kernel over the whole sequence, whichever the device has.

Where P does not divide the key/value heads, each is repeated as often as it takes for the ranks to share them: they
then hold and send them more than once. Query heads must be divisible: attention cannot use half a head.

Nothing is kept by what is sent: the backward pass of one all-to-all is the other.

Legend: b batch, s sequence, a heads, k key/value heads, d head width, P ranks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.model.exchange import exchanged


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, group: dist.ProcessGroup
) -> Tensor:
    """Causal attention of the tokens of this rank to all of the group's. q [b, a, s/P, d]; k, v [b, k, s/P, d]."""
    ranks = group.size()
    if q.shape[1] % ranks:
        degree = max(d for d in range(1, ranks) if q.shape[1] % d == 0)
        raise RecipeError(
            f"sequence_parallel cannot be {ranks}",
            where="strategy.sequence_parallel",
            why=f"the {q.shape[1]} heads of this model cannot be divided over {ranks} ranks",
            fix=f"the nearest that works is sequence_parallel: {degree}, or sequence_method: ring",
        )
    repeats = ranks // math.gcd(ranks, k.shape[1])
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    heads, tokens = partial(_to_heads, group=group), partial(_to_tokens, group=group)
    q, k, v = (exchanged(x.transpose(1, 2), heads, tokens).transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return exchanged(mixed.transpose(1, 2), tokens, heads).transpose(1, 2)


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s/P, a, d] -> [b, s, a/P, d]."""
    parts = x.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4)  # [P, b, s/P, a/P, d], by receiver
    return _exchanged(parts, group).transpose(0, 1).flatten(1, 2)  # a view of what arrived, for b = 1


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s, a/P, d] -> [b, s/P, a, d]."""
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1)  # [P, b, s/P, a/P, d], by receiver
    return _exchanged(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part p to rank p, and theirs in exchange.

    The functional collective, which returns a tensor of its own: who notes operations to repeat them (model/tape.py)
    is not told that others write to an argument.
    """
    each = [1] * group.size()
    functional: Any = torch.ops._c10d_functional
    arrived = functional.all_to_all_single(parts.contiguous(), each, each, group.group_name)
    result: Tensor = functional.wait_tensor(arrived)
    return result
