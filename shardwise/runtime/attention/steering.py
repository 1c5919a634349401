"""Makes PyTorch run the attention backend that the plan counted, in every module that calls SDPA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from shardwise.hardware.kinds import HOST, kind_of
from shardwise.runtime.attention.backend import MATH, AttentionCall, BackendOrder, call_of, enabled_backends
from shardwise.runtime.attention.check import check_of, only_backends
from shardwise.runtime.kernel_check import trusted
from shardwise.runtime.torch_private_attention import attention_by_default
from shardwise.runtime.torch_private_kernels import override_kernel

_FLASH_PACKAGES: Mapping[str, str] = {"flash3": "FA3", "flash4": "FA4"}
"""Backends that replace the kernels of PyTorch's flash attention, by PyTorch's names for them."""

_orders: dict[str, BackendOrder] = {}
"""By the type of a device of this process."""
_wrong: set[tuple[str, torch.dtype]] = set()
"""Backends that were wrong for some shape, with the dtype. Calls without gradients, as in evaluation, avoid them."""


def prefer_backends(device: torch.device, order: BackendOrder) -> None:
    """Let every later call on such a device, of any module, run the first backend of ``order`` that takes it.

    A package of FlashAttention that cannot be imported is left out.
    """
    if device.type not in _orders:
        override_kernel("scaled_dot_product_attention", _steered_attention, f"Autograd{device.type.upper()}")
    _orders[device.type] = tuple(name for name in order if name not in _FLASH_PACKAGES or _activated(name))


def _activated(name: str) -> bool:
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(_FLASH_PACKAGES[name])
    except (ImportError, RuntimeError, ValueError):
        return False
    return True


@contextmanager
def with_package(name: str) -> Iterator[bool]:
    """In this block a backend's package, if it is one of a package, replaces PyTorch's flash attention.

    Yields whether the backend can be called.
    """
    if name not in _FLASH_PACKAGES:
        yield True
        return
    if not _activated(name):
        yield False
        return
    from torch.nn.attention import restore_flash_attention_impl

    yield True
    restore_flash_attention_impl()


def _steered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Takes the arguments of SDPA."""
    order = _orders[query.device.type]
    call = call_of(query, key, value, attn_mask, dropout_p, is_causal)
    if call is not None and torch.is_grad_enabled():
        names = _trusted_backends(call, query.device, enabled_backends(call, order))
    else:  # generation makes a call of another length for each token, so these are not checked
        names = tuple(name for name in enabled_backends(call, order) if (name, query.dtype) not in _wrong)
    operands = query, key, value, attn_mask, dropout_p, is_causal
    if kind_of(query.device) is HOST and names[0] != MATH:  # whose one fused kernel PyTorch prefers
        return attention_by_default(*operands, scale=scale, enable_gqa=enable_gqa)
    with only_backends(names):
        return attention_by_default(*operands, scale=scale, enable_gqa=enable_gqa)


@cache
def _trusted_backends(call: AttentionCall, device: torch.device, names: BackendOrder) -> BackendOrder:
    """Those of ``names``, which end with math, from the first on that computes what fp64 does."""
    while names[0] != MATH and not trusted(check_of(call, device, names)):
        _wrong.add((names[0], call.dtype))
        names = names[1:]
    return names
