"""Ulysses attention for context parallelism: each rank attends to the whole sequence with some of the heads (Jacobs et
al. 2023, arXiv:2309.14509).

Before attention, an all-to-all turns [some tokens, all heads] into [all tokens, some heads], for queries, keys and
values. After it, another all-to-all turns the output back. Each moves s h / P elements per rank, and less for keys and
values with grouped heads. If P does not divide the key/value heads, each head is repeated until it does.

Legend: b batch, s sequence, h width, a heads, k key/value heads, d head width, P ranks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.runtime.documents import Documents
from shardwise.runtime.parallel.tp_collectives import exchanged
from shardwise.runtime.torch_private import functional_collectives


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    scale: float,
    group: dist.ProcessGroup,
    mask: Tensor | Documents | None = None,
) -> Tensor:
    """Attention of this rank's tokens to all tokens of the group. q [b, a, s/P, d]; k, v [b, k, s/P, d].

    It is causal, or has a mask of whole rows, the same for all heads.
    """
    ranks = group.size()
    if q.shape[1] % ranks:
        degree = max(d for d in range(1, ranks) if q.shape[1] % d == 0)
        raise RecipeError(
            f"sequence_parallel cannot be {ranks}",
            where="strategy.sequence_parallel",
            why=f"{ranks} ranks do not divide the {q.shape[1]} heads of this model",
            fix=f"the nearest that works is sequence_parallel: {degree}"
            + (", or sequence_method: ring" if mask is None else ""),
        )
    # The fewest copies of every key head that let the ranks divide them.
    repeats = ranks // math.gcd(ranks, k.shape[1])
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    heads, tokens = partial(_to_heads, group=group), partial(_to_tokens, group=group)
    q, k, v = (exchanged(x.transpose(1, 2), heads, tokens).transpose(1, 2) for x in (q, k, v))
    of_rows: Any = mask
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(
        q, k, v, of_rows, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return exchanged(mixed.transpose(1, 2), tokens, heads).transpose(1, 2)


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s/P, a, d] -> [b, s, a/P, d]."""
    parts = x.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4)  # [P, b, s/P, a/P, d], by receiver
    return _exchanged(parts, group).transpose(0, 1).flatten(1, 2)  # a view of the received tensor if b = 1


def _to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s, a/P, d] -> [b, s/P, a, d]."""
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1)  # [P, b, s/P, a/P, d], by receiver
    return _exchanged(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of equal parts: send part p to rank p.

    The functional collective returns a new tensor. Recomputation does not see that other ranks write
    to an argument.
    """
    sizes = [1] * group.size()
    arrived = functional_collectives.all_to_all_single(parts.contiguous(), sizes, sizes, group.group_name)
    result: Tensor = functional_collectives.wait_tensor(arrived)
    return result
