"""The order in which a device's attention backends are fastest, among those that compute what fp64 does."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardwise.hardware.kinds import kind_of
from shardwise.hardware.profiles import ATTENTION_BACKENDS
from shardwise.plugins.calibration.kernels import seconds_of
from shardwise.runtime.attention.backend import MATH, AttentionCall, usable_backends
from shardwise.runtime.attention.check import check_of, only_backends
from shardwise.runtime.attention.steering import with_package
from shardwise.runtime.kernel_check import trusted
from shardwise.runtime.torch_private_attention import attention_by_default

HEADS, TOKENS, WIDTH = 32, 4096, 128
"""Causal attention of one sample of a model of 8B, in bf16."""


def fastest_backends(device: torch.device, heads: int = HEADS, tokens: int = TOKENS) -> tuple[str, ...]:
    """Names of backends, the fastest first. Those with masks alone, or wrong here, come last or not at all."""
    names = ("fused",) if kind_of(device).is_host else ATTENTION_BACKENDS
    call = AttentionCall(
        torch.bfloat16, heads, heads, tokens, tokens, WIDTH, WIDTH, masked=False, causal=True, dropout=False
    )
    seconds: dict[str, float] = {}
    for name in usable_backends(call, names)[:-1]:  # the last one is MATH, with which the others are compared
        with with_package(name) as present:
            if present and trusted(check_of(call, device, (name, MATH))):
                seconds[name] = _seconds(name, call, device)
    order = sorted(seconds, key=seconds.__getitem__)
    # One package replaces the kernels of PyTorch's flash attention: the slower ones cannot run next to it.
    flash = next((name for name in order if name.startswith("flash")), "")
    return tuple(name for name in order if name == flash or not name.startswith("flash"))


def _seconds(name: str, call: AttentionCall, device: torch.device) -> float:
    """Of both passes."""
    shape = (1, call.heads, call.queries, call.width)
    q, k, v = (torch.randn(shape, device=device).to(call.dtype).requires_grad_() for _ in range(3))
    slope = torch.ones_like(q)
    return seconds_of([partial(_both_passes, name, q, k, v, slope)], device, captured=False)


def _both_passes(name: str, q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> object:
    with only_backends((name,)):
        out = attention_by_default(q, k, v, None, 0.0, True)
    return torch.autograd.grad(out, (q, k, v), slope)
