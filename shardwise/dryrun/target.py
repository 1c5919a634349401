"""Kernels of the target device where they differ from those of fake CPU tensors.

Fake ``cuda`` tensors abort the process on a PyTorch build without CUDA, so every dry run uses fake ``cpu`` tensors.
Some operations then save other tensors for the backward pass: the CPU decomposes ``rms_norm`` (two more fp32 copies of
its input), attention runs a CPU kernel, dropout saves a wider mask, and optimizers of torch loop over parameters. For
CUDA and ROCm, this module substitutes the kernels of the device. An 8-bit operator is one kernel on those devices. The
CPU emulates it, and the operations of the emulation are counted. Collectives differ too: gloo copies the tensors that
it gathers or scatters. MPS computes attention in parts, with saved scores; its other operations save what the CPU's do.

The key of the table is the device named in the recipe's *cluster*, so a laptop can plan for an H100.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwise.dryrun.ctc import CTC
from shardwise.dryrun.onednn import KERNELS, with_workspaces
from shardwise.dryrun.tracker import asked_device
from shardwise.hardware.this_machine import threads_of
from shardwise.runtime.accumulation import at_least_fp32
from shardwise.runtime.attention.backend import MATH, BackendOrder, call_of, enabled_backends
from shardwise.runtime.attention.local import LOCAL_PARTS
from shardwise.runtime.compiled import is_traced
from shardwise.runtime.float8 import EMULATED
from shardwise.runtime.parallel.attention_kernels import kernels_as
from shardwise.runtime.parallel.ring import DECOMPOSITIONS
from shardwise.runtime.torch_private import DispatchMode, eigenvectors_of, foreach_by_default, tree_iter
from shardwise.runtime.torch_private_attention import (
    cudnn_attention,
    efficient_attention,
    flash_attention,
    math_attention,
)
from shardwise.runtime.torch_private_kernels import scoped_kernels
from shardwise.runtime.torch_private_onednn import onednn_compiles


@dataclass(frozen=True)
class TargetKernels:
    """Differences between a kind of device and the fake CPU.

    Attributes:
        kernels: returns a context, entered after the tracker, that substitutes the target's kernels for the CPU's;
            from the number of processes that share a machine, and the device's order of attention backends.
        workspace: bytes that the backend allocates during a collective, from (kind, payload bytes).
        kept: bytes that a library keeps for every distinct call of a kernel, from its name, arguments and result.
        is_host: whether device memory is host memory, which also holds snapshots.
        caches: whether the allocator keeps freed memory in segments (dryrun/allocator.py).
    """

    kernels: Callable[[int, BackendOrder], AbstractContextManager[Any]]
    workspace: Callable[[str, int], int]
    kept: Callable[[str, Any, Any], int]
    is_host: bool = False
    caches: bool = False


_MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_ONEDNN_KERNEL = 560 * 1024
_AMX_KERNEL = 656 * 1024
"""Bytes of one compiled oneDNN matrix product, torch 2.13: the growth of the resident set at the first call of a shape.

AMD Zen 5 (avx512_bf16), 33 shapes: 0.51 to 0.70 MiB, mean 0.565, independent of the shape. Intel Sapphire Rapids, 43
shapes: 0.64 to 0.66 MiB for bf16 (AMX tiles), 0.45 to 0.54 MiB for fp16 (avx512_fp16)."""

_LEAST_PRODUCT = 16**3
"""Multiplications up to which PyTorch calls no oneDNN (mkldnn_gemm_min_size in its Matmul.cpp)."""

_CPU_ATTENTION_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_ATTENTION_KERNEL = 384 * 1024
"""Bytes of one compiled product of attention's backward pass: 2 to 3 MiB for the seven of a ring, Sapphire Rapids."""


@cache
def _compiled_product_bytes() -> Mapping[torch.dtype, int]:
    """Bytes of a compiled product by dtype, for the dtypes that oneDNN compiles per shape on this processor.

    fp32 products call MKL. Dtypes without instructions on this processor use ATen, or one oneDNN kernel for all shapes.
    """
    return {dtype: _AMX_KERNEL if amx else _ONEDNN_KERNEL for dtype, amx in onednn_compiles().items()}


def _onednn_kernels(operation: str, args: Any, result: Any) -> int:
    """oneDNN compiles a convolution, an LSTM and a 16-bit matrix product for each shape and never frees it."""
    if operation in KERNELS:
        dtype = next(tensor.dtype for tensor in tree_iter(result) if isinstance(tensor, Tensor))
        return KERNELS[operation] if dtype == torch.float32 or dtype in _compiled_product_bytes() else 0
    if operation == _CPU_ATTENTION_BACKWARD:
        to_queries, to_keys = result[:2]
        if to_queries.dtype not in _compiled_product_bytes():
            return 0
        return _attention_products(to_queries, to_keys) * _ATTENTION_KERNEL
    if not operation.startswith(_MATRIX_PRODUCTS):
        return 0
    left: Tensor = args[1] if "add" in operation else args[0]  # addmm(bias, left, right), mm(left, right)
    small = result.numel() * left.shape[-1] <= _LEAST_PRODUCT
    return 0 if small else _compiled_product_bytes().get(result.dtype, 0)


def _attention_products(to_queries: Tensor, to_keys: Tensor) -> int:
    """Three products for each pair of block sizes of queries and keys, [..., s, d] (FlashAttentionKernel.cpp)."""
    queries, keys = to_queries.shape[-2], to_keys.shape[-2]
    # q_split_size and kv_split_size of that file.
    if queries >= 768:
        queries_in_block = 256
    elif queries >= 192:
        queries_in_block = 64
    else:
        queries_in_block = 32
    return 3 * _block_sizes(queries, queries_in_block) * _block_sizes(keys, 512)


def _block_sizes(length: int, step: int) -> int:
    """Number of distinct block sizes when ``length`` is cut in blocks of ``step``: full blocks and a remainder."""
    full = 1 if length >= step else 0
    remainder = 1 if length % step else 0
    return full + remainder


def _nothing_kept(operation: str, args: Any, result: Any) -> int:
    """Accelerators: the device's profile holds these workspaces."""
    return 0


def _gloo_workspace(kind: str, payload: int) -> int:
    """gloo all-gathers into a flat copy of the output and reduces on a clone of the input."""
    return payload if kind in ("all_gather", "reduce_scatter") else 0


def _no_workspace(kind: str, payload: int) -> int:
    """NCCL uses buffers of the communicator, outside the caching allocator; the device's profile counts them."""
    return 0


class _FusedRMSNorm(torch.autograd.Function):
    """Substitute for CUDA's ``aten._fused_rms_norm``: saves its input, its weight and one fp32 value per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y, rstd = torch.ops.shardwise.rms_norm(x, weight)
        ctx.save_for_backward(x, rstd, *([] if weight is None else [weight]))
        return cast("Tensor", y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, rstd, *weight = ctx.saved_tensors
        to_x, *to_weight = torch.ops.shardwise.rms_norm_backward(grads[0], x, rstd, weight)
        return to_x, to_weight[0] if weight else None


def _rms_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _rms_norm_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (x, *weight)]


_TARGET_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")  # lives as long as the process
_TARGET_LIBRARY.define("rms_norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
_TARGET_LIBRARY.define("rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor[] weight) -> Tensor[]")
torch.library.register_fake("shardwise::rms_norm", _rms_norm, lib=_TARGET_LIBRARY)
torch.library.register_fake("shardwise::rms_norm_backward", _rms_norm_backward, lib=_TARGET_LIBRARY)


@contextmanager
def cuda_kernels(processes: int, attention: BackendOrder, device_type: str = "cuda") -> Iterator[None]:
    """Make the dispatcher call CUDA's eager kernels for attention, RMS norm and dropout; ROCm's have the same names."""
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": partial(_cuda_attention, attention),
        "rms_norm": _fused_rms_norm,
        "dropout": _fused_dropout,
    }
    with foreach_by_default(), _substituted(kernels, (device_type, attention), {}):
        yield


@contextmanager
def mps_kernels(processes: int, attention: BackendOrder) -> Iterator[None]:
    """Make the dispatcher call MPS's kernels: attention in parts, for which autograd saves the scores."""
    with _substituted({"scaled_dot_product_attention": _attention_in_parts}, ("mps", attention), EMULATED):
        yield


@contextmanager
def _substituted(
    kernels: Mapping[str, Callable[..., Any]],
    planned: tuple[str, BackendOrder],
    emulated: Mapping[str, Callable[..., Any]],
) -> Iterator[None]:
    """Register kernels at the dispatcher's autograd key.

    So they apply to every call of these operations, in the forward pass and in recomputation.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        parts = _Parts({**_COMPOSED, **emulated})
        with scoped_kernels(kernels, "AutogradCPU"), kernels_as(*planned), parts:
            yield


def _attention_in_parts(*operands: Any, **options: Any) -> Tensor:
    """The path of torch's dispatcher on MPS where a gradient is needed. Takes the arguments of SDPA."""
    return cast("Tensor", math_attention(*operands, **options)[0])


def _fused_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if is_traced():
        return _rms_norm_in_parts(x, weight, eps)
    return _FusedRMSNorm.apply(x, weight)


def _rms_norm_in_parts(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """What a compiler takes the norm apart into, to fuse it with its neighbours."""
    wide = at_least_fp32(x)
    least = torch.finfo(x.dtype).eps if eps is None else eps
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + least)
    return (scaled if weight is None else scaled * weight).to(x.dtype)


def _fused_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Saves a mask of one byte per value. On the CPU the mask has the dtype of ``x``."""
    if p == 0 or not train:
        return x
    return torch.ops.aten.native_dropout(x, p, train)[0]


def _cuda_attention(
    order: BackendOrder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel of the first backend that takes the call, as in a run. But for ``order``, the arguments of SDPA."""
    name = enabled_backends(call_of(query, key, value, attn_mask, dropout_p, is_causal), order)[0]
    if name == "cudnn":
        return cudnn_attention(query, key, value, None, True, dropout_p, is_causal, False, scale=scale)[0]
    if name.startswith("flash"):
        return flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if name == MATH:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    # [b, heads, s, d]. The efficient kernel has as many heads of keys as of queries.
    if enable_gqa and (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # each call converts and saves it
        mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = mask.masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _eigenvectors(matrix: Tensor, uplo: str = "L", vectors: bool = True) -> tuple[Tensor, Tensor]:
    """With the workspace of LAPACK's and cuSOLVER's syevd for a matrix [n, n], which is no tensor."""
    size = matrix.shape[-1]
    # LAPACK: LWORK >= 1 + 6 n + 2 n^2 with vectors (JOBZ = V).
    workspace = matrix.new_empty(2 * size * size + 6 * size + 1)
    eigenvectors = eigenvectors_of(matrix, uplo, vectors)
    del workspace
    return eigenvectors


_COMPOSED = {**DECOMPOSITIONS, **LOCAL_PARTS, **CTC, "aten::_linalg_eigh": _eigenvectors}
"""Operators that are no single kernel on any device, and what they call."""


class _Parts(DispatchMode):
    """Decomposes some operators, most of the namespace ``shardwise``, so that the tracker sees their parts.

    The mode is entered after the tracker and before the modes of techniques. So a technique still sees the whole
    operator, as in training, and can save its result.
    """

    def __init__(self, parts: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._parts = parts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        parts = self._parts.get(func.name().removeprefix("shardwise::"))
        return (func if parts is None else parts)(*args, **(kwargs or {}))


def _cpu_kernels(processes: int, attention: BackendOrder) -> _Parts:
    """Decompose fused operators (ring attention, emulated fp8) so that the tracker sees their parts, and workspaces."""
    return _Parts({**_COMPOSED, **EMULATED, **with_workspaces(threads_of(processes))})


TARGET_KERNELS: dict[str, TargetKernels] = {
    "cpu": TargetKernels(_cpu_kernels, _gloo_workspace, _onednn_kernels, is_host=True),
    "cuda": TargetKernels(cuda_kernels, _no_workspace, _nothing_kept, caches=True),
    "mps": TargetKernels(mps_kernels, _no_workspace, _nothing_kept),
    "rocm": TargetKernels(
        partial(cuda_kernels, device_type="rocm"), _no_workspace, _nothing_kept, caches=True
    ),
}
