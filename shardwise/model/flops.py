"""FLOPs of one operation, and the bytes of tensors: what planning and the choice of what to recompute count with.

FLOPs come from PyTorch's own registry (``torch.utils.flop_counter``), but for attention, where it lacks kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Two products per query head: scores and output. Shapes [b, h, s, d]; key heads may be fewer."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (width + value[-1])


def attention_backward_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Five products per query head: the scores again, and gradients of scores, value, query and key."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (3 * width + 2 * value[-1])


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATTENTION = {f"aten::_scaled_dot_product_{kernel}": (0, attention_flops) for kernel in _KERNELS} | {
    f"aten::_scaled_dot_product_{kernel}_backward": (1, attention_backward_flops) for kernel in _KERNELS
}
"""Attention by operation: where its query, key and value begin among the arguments, and the formula. The
registry's own does not know grouped queries before torch 2.12, nor the CPU's kernel at all."""


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of one call: matrix products, convolutions and attention; 0 for everything else."""
    if (attention := _ATTENTION.get(func.name())) is not None:
        first, formula = attention
        return formula(*(tensor.shape for tensor in args[first : first + 3]))
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0
