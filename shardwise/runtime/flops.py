"""FLOPs of one operation and bytes of tensors, for the planner and for the choice of recomputed operations.

FLOPs come from PyTorch's registry (``torch.utils.flop_counter``), except for attention, grouped products and recurrent
nets, where it lacks kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.runtime.torch_private import TorchDispatchMode, packet_of, schema_of


def tensor_bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, causal: bool = False, window: int = 0
) -> int:
    """Two products per query head: scores and output. Shapes [b, h, s, d]; there may be fewer key heads.

    A causal kernel skips the later half of the keys, as FlashAttention counts it (Dao 2023, section 4.1), and those
    before a query's last ``window`` ones, where that is not 0.
    """
    return _pairs(query, key, causal, window) * (query[-1] + value[-1])


def attention_backward_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, causal: bool = False, window: int = 0
) -> int:
    """Five products per query head: recomputed scores, and gradients of scores, value, query and key."""
    return _pairs(query, key, causal, window) * (3 * query[-1] + 2 * value[-1])


def _pairs(query: torch.Size, key: torch.Size, causal: bool, window: int) -> int:
    """Twice the pairs of a query and a key in all query heads."""
    batch, heads, rows, _ = query
    if window:
        return batch * heads * (2 * rows * window - window * window)
    return (1 if causal else 2) * batch * heads * rows * key[-2]


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_ATTENTION_FORWARD = frozenset(f"aten::_scaled_dot_product_{kernel}" for kernel in _KERNELS)
_ATTENTION_BACKWARD = frozenset(f"{name}_backward" for name in _ATTENTION_FORWARD)
_VARLEN, _VARLEN_BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
_LOCAL = "shardwise::local_attention"
"""Attention kernels. The arguments are (query, key, value, ...); a backward kernel has its gradient before them.

The registry's formula ignores grouped queries before torch 2.12 and causal attention, and lacks the CPU's kernel.
"""


def grouped_flops(left: torch.Size, right: torch.Size) -> int:
    """A product per group, where the groups divide the rows (2-D by 3-D), the columns (3-D by 2-D) or the summed
    dimension (2-D by 2-D) of a matrix.
    """
    if len(left) == 3 and len(right) == 2:
        return 2 * left[1] * right.numel()
    return 2 * left.numel() * right[-1]


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs that one call executes: products of matrices (also grouped and recurrent ones), convolutions, attention."""
    name = func.name()
    if name in _ATTENTION_FORWARD or name == _VARLEN:
        query, key, value = _attention_shapes(func, args)
        return attention_flops(query, key, value, _is_causal(func, args, kwargs), _window(kwargs))
    if name in _ATTENTION_BACKWARD or name == _VARLEN_BACKWARD:
        query, key, value = _attention_shapes(func, args)
        return attention_backward_flops(query, key, value, _is_causal(func, args, kwargs), _window(kwargs))
    if name == _LOCAL:
        query, key, value, _, mask, _, window = args
        return attention_flops(query.shape, key.shape, value.shape, mask is None, window)
    if name == "aten::_grouped_mm":
        return grouped_flops(args[0].shape, args[1].shape)
    if name in _RECURRENT:
        steps, batch, _ = args[0].shape
        return _RECURRENT[name] * 2 * steps * batch * (args[1].numel() + args[2].numel())
    count = flop_registry.get(_IN_PLACE.get(name) or packet_of(func))
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


_PRODUCT_ARGUMENTS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::_scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "shardwise::float8_product": (0, 2),
}
"""Operations of one product or of equal ones, and the positions of both operands."""

_IN_PLACE = {"aten::addmm_": torch.ops.aten.addmm, "aten::baddbmm_": torch.ops.aten.baddbmm}
"""Products that are added in place, which the registry lacks, and the operation with the same FLOPs: LoRA adds so to
the base layer's product, and the chunked loss to the gradient of the head."""

_RECURRENT = {"aten::mkldnn_rnn_layer": 1, "aten::mkldnn_rnn_layer_backward": 2}
"""oneDNN's LSTM: two products per time step, with the input and the hidden state, and twice as many backward."""


def recomputed_flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The part of ``flops_of`` that repeats work of the forward pass: the scores in an attention backward kernel."""
    if func.name() not in _ATTENTION_BACKWARD and func.name() != _VARLEN_BACKWARD:
        return 0
    query, key, _ = _attention_shapes(func, args)
    return _pairs(query, key, _is_causal(func, args, kwargs), _window(kwargs)) * query[-1]


def _attention_shapes(func: Any, args: tuple[Any, ...]) -> list[torch.Size]:
    """Shapes of query, key and value, [b, h, s, d].

    The kernel of variable length takes [b, s, h, d], or rows end to end, [b s, h, d]. Documents in these are counted as
    if each row were one: their lengths are on the device.
    """
    names = [argument.name for argument in schema_of(func).arguments]
    first = names.index("query")
    shapes = [tensor.shape for tensor in args[first : first + 3]]
    if func.name() not in (_VARLEN, _VARLEN_BACKWARD):
        return shapes
    if len(shapes[0]) == 4:
        return [torch.Size((batch, heads, row, width)) for batch, row, heads, width in shapes]
    rows = [args[names.index(f"max_{of}")] for of in "qkk"]
    return [
        torch.Size((total // row, heads, row, width))
        for (total, heads, width), row in zip(shapes, rows, strict=True)
    ]


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    index = [argument.name for argument in schema_of(func).arguments].index("is_causal")
    return bool(args[index]) if index < len(args) else False


def _window(kwargs: Mapping[str, Any]) -> int:
    """Keys that a query sees, itself the last one; 0 for all."""
    before = kwargs.get("window_size_left")
    return 0 if before is None or before < 0 else before + 1


def product_shape(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """(products, m, n, k) of a matrix product; (heads of all samples, queries, keys, head dimension) of attention.

    () for other operations, and for products of groups of unequal sizes.
    """
    name = func.name()
    if name in _ATTENTION_FORWARD or name in _ATTENTION_BACKWARD or name in (_VARLEN, _VARLEN_BACKWARD):
        query, key, _ = _attention_shapes(func, args)
        return query[0] * query[1], query[2], key[-2], query[-1]
    # Compiled code gives the result's memory, and an operation in place its first argument's.
    places = _PRODUCT_ARGUMENTS.get(name.removesuffix(".out").removesuffix("_"))
    if places is None:
        return ()
    left, right = (args[index].shape for index in places)
    return (left[0] if len(left) == 3 else 1), left[-2], right[-1], left[-1]


class FlopCounter(TorchDispatchMode):
    """Sums the FLOPs of all calls in its ``with`` block.

    Attributes:
        flops: of everything that was executed.
        recomputed: the part of it that an attention backward kernel computes again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.recomputed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, out)
        self.recomputed += recomputed_flops_of(func, args, kwargs)
        return out
