"""What the target device would run where the CPU, on which fake tensors live, would run something else.

Fake ``cuda`` tensors abort the process on a build of PyTorch without CUDA, so every dry run is on fake ``cpu``
tensors. Some operations then differ in what they keep for the backward pass: ``rms_norm`` is decomposed on the
CPU (two fp32 copies of its input more), attention takes a CPU kernel, dropout keeps a wider mask. For CUDA and ROCm
they are replaced by what runs there. 8-bit operators are one kernel each there, and are emulated on the CPU, where
the parts of the emulation are counted. Collectives differ too: gloo copies what it gathers or scatters.

The table is keyed by what the *cluster* says it is, so a laptop plans for an H100 and an H100 could plan for a
laptop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.dryrun.tracker import asked_device
from shardwise.model.attention_kernels import kernels_as
from shardwise.model.float8 import EMULATED
from shardwise.model.ring import PARTS


@dataclass(frozen=True)
class Target:
    """How a kind of device differs from the fake CPU.

    Attributes:
        kernels: makes a context, entered after the tracker, in which the target's kernels stand in for the CPU's.
        workspace: bytes a collective allocates for itself, from (kind, payload bytes).
        kept: bytes a library keeps for every distinct call of a kernel, from its name and result.
        is_host: whether its memory is the host's, where snapshots are kept.
        caches: whether its allocator keeps freed memory in segments (dryrun/allocator.py).
    """

    kernels: Callable[[], AbstractContextManager[Any]]
    workspace: Callable[[str, int], int]
    kept: Callable[[str, Any], int]
    is_host: bool = False
    caches: bool = False


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ONEDNN_KERNEL, _AMX_KERNEL = 560 * 1024, 656 * 1024
"""Bytes of one compiled oneDNN product, torch 2.13: the growth of the resident set at the first call of a shape. AMD
Zen 5 (avx512_bf16), 33 shapes: 0.51 to 0.70 MiB, mean 0.565, whatever the shape. Intel Sapphire Rapids: bf16, for whose
tiles (AMX) it compiles more, 0.64 to 0.66 MiB over 43 shapes; fp16 (avx512_fp16) 0.45 to 0.54 MiB."""


_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_ATTENTION_KERNEL = 384 * 1024
"""Bytes of one that attention's backward pass has compiled: 2 to 3 MiB for the seven of a ring, Sapphire Rapids."""


@cache
def _compiled() -> Mapping[torch.dtype, int]:
    """Bytes of a compiled product by dtype, of those that oneDNN compiles for each shape on this processor.

    fp32 products call MKL, and what the processor has no instructions for ATen or one kernel for all shapes, which
    oneDNN has for bf16 where AVX512 lacks it.
    """
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if not torch.backends.mkldnn.is_available() or not torch.cpu._is_avx512_bf16_supported():
        return {}
    size = {torch.bfloat16: _AMX_KERNEL if torch.cpu._is_amx_tile_supported() else _ONEDNN_KERNEL}
    return {dtype: size.get(dtype, _ONEDNN_KERNEL) for dtype, known in supported.items() if known()}


def _onednn_kernels(operation: str, result: Any) -> int:
    """oneDNN compiles a matrix product in 16 bits for each of its shapes and keeps it for good."""
    if operation == _ATTENTION:
        return _attention_products(*result[:2]) * _ATTENTION_KERNEL if result[0].dtype in _compiled() else 0
    return _compiled().get(result.dtype, 0) if operation.startswith(_PRODUCTS) else 0


def _attention_products(to_queries: Tensor, to_keys: Tensor) -> int:
    """Three of each pair of block sizes of queries and keys (ATen's FlashAttentionKernel.cpp), [..., s, d]."""
    queries, keys = to_queries.shape[-2], to_keys.shape[-2]
    step = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return 3 * _block_sizes(queries, step) * _block_sizes(keys, 512)


def _block_sizes(length: int, step: int) -> int:
    """How many there are when so much is cut in steps: whole ones and what is left over."""
    return (length >= step) + (length % step > 0)


def _nothing_kept(operation: str, result: Any) -> int:
    """On accelerators: in the workspaces of the device's profile."""
    return 0


def _gloo_workspace(kind: str, payload: int) -> int:
    """gloo gathers into a flat copy of the output and reduces on a clone of the input."""
    return payload if kind in ("all_gather", "reduce_scatter") else 0


def _no_workspace(kind: str, payload: int) -> int:
    """NCCL works in buffers of the communicator, outside the allocator: a row of the device's profile."""
    return 0


class _FusedRMSNorm(torch.autograd.Function):
    """Stands in for ``aten._fused_rms_norm`` on CUDA: keeps its input, its weight and one fp32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, rstd, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, _, *weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Let the dispatcher call what CUDA runs eagerly for attention, RMS norm and dropout.

    Registered below autograd's entry for these operations, so it holds however a model reaches them, in the
    forward pass and in a recomputation.
    """
    scoped = torch.library._scoped_library("aten", "IMPL")
    with warnings.catch_warnings(), scoped as library, kernels_as("cuda"), _Parts(PARTS):
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        library.impl("scaled_dot_product_attention", _cuda_attention, "AutogradCPU")
        library.impl("rms_norm", _fused_rms_norm, "AutogradCPU")
        library.impl("dropout", _fused_dropout, "AutogradCPU")
        yield


def _fused_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _FusedRMSNorm.apply(x, weight)


def _fused_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Keeps a mask of one byte per value; on the CPU the mask has the dtype of ``x``."""
    if p == 0 or not train:
        return x
    return torch.ops.aten.native_dropout(x, p, train)[0]


def _cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention in 16 bits without a mask, else the memory-efficient kernel (torch's own order)."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa and (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # each call converts it, and keeps the result
        mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = mask.masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


class _Parts(TorchDispatchMode):
    """Lets some operators of the namespace ``shardwise`` be seen as what they are made of.

    A mode, entered after the tracker and before any that a technique enters: what a technique does with an operation
    as a whole, such as keeping its result, it then does here as in training.
    """

    def __init__(self, parts: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._parts = parts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        made_of = self._parts.get(func.name().removeprefix("shardwise::"))
        return (made_of or func)(*args, **(kwargs or {}))


def _cpu_kernels() -> _Parts:
    """Of what is one operator: the ring, and what is emulated where there are no 8-bit products."""
    return _Parts({**PARTS, **EMULATED})


TARGETS: dict[str, Target] = {
    "cpu": Target(_cpu_kernels, _gloo_workspace, _onednn_kernels, is_host=True),
    "cuda": Target(cuda_kernels, _no_workspace, _nothing_kept, caches=True),
    "rocm": Target(cuda_kernels, _no_workspace, _nothing_kept, caches=True),
}
