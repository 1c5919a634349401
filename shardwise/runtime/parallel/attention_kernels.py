"""Attention kernels that also return the log-sum-exp, so that attention over parts of the keys can be merged.

``backward`` takes the merged output and log-sum-exp and returns the gradients of one part of the keys.

The kernels are those of ``scaled_dot_product_attention``: flash attention on the CPU; on accelerators flash attention
in 16 bits and the memory-efficient kernel in fp32. Accelerators have no fp64 kernel, so fp64 forms the scores
explicitly. A dry run, whose tensors are on a fake CPU, sets the planned device by ``kernels_as``.

Legend: b batch, a heads, k key/value heads, s queries, t keys, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.hardware.kinds import DEVICE_KINDS, HOST, DeviceKind, before_ampere, kind_of
from shardwise.runtime.torch_private_attention import (
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_attention_for_cpu,
    flash_attention_for_cpu_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
)

_LOGARITHMS = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this."""

_BIAS_ALIGNMENT = 16
"""Of a row of its mask, in elements."""

_WIDTH_MULTIPLE = 8
"""The accelerators' kernels need head widths that are multiples of this."""

WIDEST_HEAD = 256
"""Head width of flash attention."""

_planned: tuple[str, tuple[str, ...]] | None = None


@contextmanager
def kernels_as(device_type: str, attention: tuple[str, ...] = ()) -> Iterator[None]:
    """Use this device type's kernels inside the context, for the dry run.

    Args:
        attention: the device's order of attention's backends.
    """
    global _planned
    before = _planned
    _planned = (device_type, attention)
    try:
        yield
    finally:
        _planned = before


def planned_kernels() -> tuple[str, tuple[str, ...]] | None:
    """The device type whose kernels are used in place of those of the tensors' device, if any, with its order of
    attention's backends.
    """
    return _planned


class Kernels(Protocol):
    """q [b, a, s, d], k and v [b, k, t, d]; ``causal`` requires s = t, and excludes a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(output [b, a, s, d], log-sum-exp [b, a, s] in fp32, in fp64 for fp64)."""
        ...

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, given (output gradient, q, k, v, output, log-sum-exp)."""
        ...


def _kernel_device(tensor: Tensor) -> DeviceKind:
    if _planned is not None:
        return DEVICE_KINDS[_planned[0]]
    return HOST if tensor.is_meta else kind_of(tensor.device)  # of meta tensors only shapes are asked


def kernels_for(tensor: Tensor, mask: Tensor | None = None) -> Kernels:
    """The kernels for a tensor's dtype on its device, or on the planned device.

    Args:
        mask: additive, in the dtype of the tensor, [s, t] or with the dims of batch and heads before it.
    """
    if _kernel_device(tensor).is_host:
        return _OnCPU(mask)
    if tensor.dtype == torch.float64:
        return _Products(mask)
    in_flash = mask is None and tensor.dtype in (torch.float16, torch.bfloat16)
    return _Flash() if in_flash else _Efficient(mask)


def padding_for(tensor: Tensor) -> int:
    """Number of zeros to append to the head width for the kernels."""
    return 0 if _kernel_device(tensor).is_host else -tensor.shape[-1] % _WIDTH_MULTIPLE


def has_varlen_kernel(like: Tensor, head_width: int) -> bool:
    """Whether flash attention of variable length runs in a tensor's dtype on its device, or on the planned device.

    It needs 16 bits, head widths of at most 256 and an NVIDIA GPU since Ampere; a plan does not look at the generation.
    """
    if like.dtype not in (torch.float16, torch.bfloat16) or head_width > WIDEST_HEAD:
        return False
    return _kernel_device(like) is DEVICE_KINDS["cuda"] and not before_ampere(like.device)


@dataclass(frozen=True, eq=False)
class _OnCPU:
    mask: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, logarithms = flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=self.mask, scale=scale)
        return out, logarithms

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        options = {"attn_mask": self.mask, "scale": scale}
        dq, dk, dv = flash_attention_for_cpu_backward(*saved, 0.0, causal, **options)
        return dq, dk, dv


class _Flash:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        results: Any = flash_attention(q, k, v, 0.0, causal, scale=scale)
        return results[0], results[1]

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        logarithms = saved[-1].contiguous()  # the kernel ignores strides
        lengths = None, None, saved[1].shape[2], saved[2].shape[2]
        state = _unused_random_state(logarithms.device)
        dq, dk, dv = flash_attention_backward(
            *saved[:-1], logarithms, *lengths, 0.0, causal, *state, scale=scale
        )
        return dq, dk, dv


@dataclass(frozen=True, eq=False)
class WindowedFlash:
    """Flash attention in 16 bits in which a query sees ``window`` tokens, itself the last one."""

    window: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        lengths = None, None, q.shape[2], k.shape[2]
        options = {"scale": scale, **self._limits}
        results: Any = flash_attention_varlen(*rows, *lengths, 0.0, causal, False, **options)
        return results[0].transpose(1, 2), results[1]

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        rows = [x.transpose(1, 2) for x in saved[:-1]]
        lengths = None, None, saved[1].shape[2], saved[2].shape[2]
        logarithms = saved[-1].contiguous()
        state = _unused_random_state(logarithms.device)
        options = {"scale": scale, **self._limits}
        dq, dk, dv = flash_attention_varlen_backward(
            *rows, logarithms, *lengths, 0.0, causal, *state, **options
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    @property
    def _limits(self) -> dict[str, int]:
        return {"window_size_left": self.window - 1, "window_size_right": 0}


@dataclass(frozen=True, eq=False)
class _Efficient:
    mask: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        out, logarithms, *_ = efficient_attention(q, k, v, self._bias(q), True, 0.0, causal, scale=scale)
        return out, logarithms[:, :, : q.shape[2]]

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        gradient, q, k, v, out, logarithms = saved
        wide = [_repeated(x, q.shape[1]) for x in (k, v)]
        padded = F.pad(logarithms, (0, -q.shape[2] % _LOGARITHMS), value=torch.inf).contiguous()
        state = [torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2)]
        wanted = [True, True, True, False]
        dq, dk, dv, _ = efficient_attention_backward(
            gradient, q, *wide, self._bias(q), out, padded, *state, 0.0, wanted, causal, scale=scale
        )
        return dq, _sum_repeated(dk, k.shape[1]), _sum_repeated(dv, k.shape[1])

    def _bias(self, q: Tensor) -> Tensor | None:
        """The mask in the shape and with the alignment that the kernel requires."""
        if self.mask is None:
            return None
        keys = self.mask.shape[-1]
        aligned = F.pad(self.mask, (0, -keys % _BIAS_ALIGNMENT))[..., :keys]
        return aligned.expand(*q.shape[:-1], keys)


@dataclass(frozen=True, eq=False)
class _Products:
    mask: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        scores = self._scores(q, k, causal, scale)
        logarithms = scores.logsumexp(-1)
        return (scores - logarithms.unsqueeze(-1)).exp() @ v, logarithms

    def backward(self, *saved: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        gradient, q, k, v, out, logarithms = saved
        heads = k.shape[1]
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        probabilities = (self._scores(q, k, causal, scale) - logarithms.unsqueeze(-1)).exp()
        of_scores = gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)
        of_scores = of_scores * probabilities * scale
        of_k, of_v = of_scores.mT @ q, probabilities.mT @ gradient
        return of_scores @ k, _sum_repeated(of_k, heads), _sum_repeated(of_v, heads)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = q @ k.mT * scale
        if self.mask is not None:
            return scores + self.mask
        if not causal:
            return scores
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, -torch.inf)


def _unused_random_state(device: torch.device) -> list[Tensor]:
    """That of flash attention's dropout, which these calls do not have."""
    return [torch.empty(size, dtype=torch.uint64, device=device) for size in ((2,), ())]


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_repeated(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of ``_repeated``: sum over the repeated heads."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)
