"""The kernel of ``scaled_dot_product_attention``, chosen from the device's profile and the shapes of the call.

PyTorch chooses by release and generation: since 2.10 cuDNN comes first on Hopper and on Blackwell, also with dense
masks. It is slower than FlashAttention on Blackwell (0.88 of it, github.com/huggingface/transformers/issues/48163) and
returns NaN gradients for masked rows on Hopper (github.com/pytorch/pytorch/issues/196678). Here the order of preference
is a fact of the device (``DeviceProfile.attention``): a table, or what ``shardwise doctor --calibrate`` measured. The
first backend of that order runs that takes the call and that the model's own ``torch.nn.attention.sdpa_kernel`` does
not exclude. The dry run asks the same function, so a plan counts the kernel that runs.

    cudnn       16 bits, head widths up to 128, no mask
    flash       16 bits, one head width up to 256, no mask: FlashAttention-2
    flash3/4    the same operator by FlashAttention-3 or -4, where their packages are installed and were measured faster
    efficient   16 bits or fp32, masks
    fused       the CPU's flash attention
    math        the scores as a tensor; takes everything, and comes last

Before a run trusts a backend, check.py compares it with fp64; steering.py makes PyTorch run it.

Refused: FlexAttention for masks. It needs Dynamo, which takes no fake tensors of a dry run; the masks of packed
documents have a kernel without one (runtime/documents.py).

Legend: b batch, a heads, k key/value heads, s queries, t keys, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from shardwise.core.errors import RecipeError

MATH = "math"
BackendOrder = tuple[str, ...]
"""Names of backends, the preferred one first."""

SDPA_BACKENDS: Mapping[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "flash4": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
_HALF = (torch.float16, torch.bfloat16)
_WIDEST_CUDNN = 128
_WIDEST_FLASH = 256


@dataclass(frozen=True)
class AttentionCall:
    """The shapes of one call without the batch: what a choice, and a check, depend on.

    Attributes:
        heads, kv_heads, queries, keys: a, k, s, t.
        width, value_width: d of queries and keys, and of values.
        masked: whether it has a dense mask.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    masked: bool
    causal: bool
    dropout: bool


def call_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> AttentionCall | None:
    """q [b, a, s, d]; k, v [b, k, t, d]. None for other numbers of dims, which have no kernel but math."""
    if query.dim() != 4:
        return None
    return AttentionCall(
        query.dtype,
        *(query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3]),
        masked=mask is not None,
        causal=causal,
        dropout=dropout > 0,
    )


def _cudnn_takes(call: AttentionCall) -> bool:
    widths = call.width, call.value_width
    return (
        call.dtype in _HALF
        and not call.masked
        and call.keys > 1
        and max(widths) <= _WIDEST_CUDNN
        and all(width % 8 == 0 for width in widths)
    )


def _flash_takes(call: AttentionCall) -> bool:
    # Flash attention's causal mask ends at the last key, PyTorch's begins at the first one.
    square = call.queries == call.keys or not call.causal
    return (
        call.dtype in _HALF and not call.masked and square and call.width == call.value_width <= _WIDEST_FLASH
    )


def _later_flash_takes(call: AttentionCall) -> bool:
    return _flash_takes(call) and not call.dropout and call.width <= _WIDEST_CUDNN and call.width % 8 == 0


def _efficient_takes(call: AttentionCall) -> bool:
    multiple = 8 if call.dtype in _HALF else 4
    return call.dtype != torch.float64 and call.width % multiple == 0 == call.value_width % multiple


_TAKES: Mapping[str, Callable[[AttentionCall], bool]] = {
    "cudnn": _cudnn_takes,
    "flash": _flash_takes,
    "flash3": _later_flash_takes,
    "flash4": _later_flash_takes,
    "efficient": _efficient_takes,
    "fused": lambda call: True,
}
"""The conditions of PyTorch's dispatcher (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), but for the masks that
cuDNN would take. Flash attention pads head widths that are no multiples of 8."""


_IS_ENABLED: Mapping[SDPBackend, Callable[[], bool]] = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def enabled_backends(call: AttentionCall | None, order: BackendOrder) -> BackendOrder:
    """Those of ``order`` that take the call, and math, without what the model's own ``sdpa_kernel`` excludes.

    Raises:
        RecipeError: nothing is left.
    """
    enabled = tuple(name for name in order if _IS_ENABLED[SDPA_BACKENDS[name]]())
    names = usable_backends(call, enabled)
    if names == (MATH,) and not _IS_ENABLED[SDPBackend.MATH]():
        raise RecipeError(
            "no attention kernel takes a call of the model",
            why=f"its sdpa_kernel allows {', '.join(enabled) or 'none of this device'}, and not math",
            fix="allow SDPBackend.MATH, too",
        )
    return names


@lru_cache(maxsize=1024)
def usable_backends(call: AttentionCall | None, order: BackendOrder) -> BackendOrder:
    """Those of ``order`` that take the call, and math."""
    if call is None:
        return (MATH,)
    return (*(name for name in order if _TAKES[name](call)), MATH)
