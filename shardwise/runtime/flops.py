"""FLOPs of one operation and bytes of tensors, for the planner and for the choice of recomputed operations.

FLOPs come from PyTorch's registry (``torch.utils.flop_counter``), except for attention, where it lacks kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.runtime.torch_private import packet_of


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Two products per query head: scores and output. Shapes [b, h, s, d]; there may be fewer key heads."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (width + value[-1])


def attention_backward_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Five products per query head: recomputed scores, and gradients of scores, value, query and key."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (3 * width + 2 * value[-1])


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATTENTION = {f"aten::_scaled_dot_product_{kernel}": (0, attention_flops) for kernel in _KERNELS} | {
    f"aten::_scaled_dot_product_{kernel}_backward": (1, attention_backward_flops) for kernel in _KERNELS
}
"""Attention by operation: index of the query argument (key and value follow), and the formula.

The registry's formula ignores grouped queries before torch 2.12, and lacks the CPU's kernel.
"""


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of one call: matrix products, convolutions and attention; 0 for everything else."""
    if (attention := _ATTENTION.get(func.name())) is not None:
        first, formula = attention
        return formula(*(tensor.shape for tensor in args[first : first + 3]))
    count = flop_registry.get(packet_of(func))
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0
