"""Whether a kernel of this device computes what a wider precision does, before a run trusts it.

Fast kernels are wrong silently, on some devices, for some shapes: cuDNN's attention returned NaN gradients for masked
sequences of 64 more than a multiple of 128 (github.com/pytorch/pytorch/issues/196678), and corrupted results on
Blackwell (github.com/pytorch/pytorch/issues/193893). So a kernel is compared once for each shape on each device. The
answer is kept on the disk, by device, driver, PyTorch and shape.

A comparison runs in a thread of its own: modes, hooks of saved tensors and grad mode belong to threads, and a first
call may be within a traced block or a recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shardwise.core.cache_folder import default_root, key_of, store
from shardwise.hardware.kinds import kind_of
from shardwise.hardware.this_machine import cpu_model

CHECKS_VERSION = 2
"""Of the comparisons. Answers of earlier ones are not read."""

KERNEL_TOLERANCES = {torch.bfloat16: 2**-3, torch.float16: 2**-5, torch.float32: 2**-8, torch.float64: 1e-9}
"""Largest error of a row relative to its norm. 16 roundings in 16 bits; fp32 products may be rounded to TF32."""

_ROUNDED_ZERO = 2**-10
"""Gradients of q and k are 0 where a query sees one key, and have a norm of about √(width / keys) elsewhere."""

_replaced: list[str] = []
_check_listeners: list[Callable[[], None]] = []


@dataclass(frozen=True)
class KernelCheck:
    """One kernel with one shape on one device.

    Attributes:
        kernel: its name for users.
        shape: its shape class in words; with the kernel's name, the key of the answer.
        error: the largest error of a row relative to its norm; NaN or infinite for non-finite values.
    """

    kernel: str
    shape: str
    device: torch.device
    dtype: torch.dtype
    error: Callable[[], float]


def trusted(check: KernelCheck) -> bool:
    """Whether the kernel's error is within the tolerance of its dtype. A kernel that raises is not trusted."""
    path = default_root() / "kernels" / f"{_key(check)}.txt"
    error = _stored_error(path)
    if error is None:
        error = _measured_error(check)
        if error != math.inf:  # the memory may have run out, which says nothing of the kernel
            store(path, repr(error).encode())
        for listener in _check_listeners:
            listener()
    if error <= KERNEL_TOLERANCES[check.dtype]:  # False for NaN
        return True
    how = "raises" if error == math.inf else f"has an error of {error:.2g}"
    _replaced.append(
        f"{check.kernel} {how} for {check.shape} on {_device_name(check.device)}: it is not used for them"
    )
    return False


def after_each_check(listener: Callable[[], None]) -> None:
    """Call this after every comparison that ran, such as to forget its memory."""
    _check_listeners.append(listener)


def newly_replaced() -> list[str]:
    """Sentences on the kernels that this process does not use, since the last call."""
    sentences = _replaced.copy()
    _replaced.clear()
    return sentences


def _measured_error(check: KernelCheck) -> float:
    def alone() -> float:
        if not kind_of(check.device).is_host:
            torch.get_device_module(check.device).set_device(check.device)
        return check.error()

    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(alone).result()
    except RuntimeError:
        return math.inf


def _stored_error(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _key(check: KernelCheck) -> str:
    device = _device_name(check.device)
    return key_of((CHECKS_VERSION, device, *_software(), check.kernel, check.shape))


def _device_name(device: torch.device) -> str:
    return cpu_model() if kind_of(device).is_host else torch.get_device_module(device).get_device_name(device)


@cache
def _software() -> tuple[str, ...]:
    """Versions of PyTorch, CUDA or ROCm, cuDNN and NVIDIA's driver."""
    driver = Path("/proc/driver/nvidia/version")
    try:
        installed = driver.read_text(encoding="utf-8")
    except OSError:
        installed = ""
    runtime = torch.version.cuda or torch.version.hip
    return torch.__version__, str(runtime), str(torch.backends.cudnn.version()), installed


def row_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest error of a row (last dim) relative to its norm, or to a tenth of the rows' root mean square norm.

    Operands are of size 1, so rows below ``_ROUNDED_ZERO`` are the roundings of a 0.
    """
    difference = (result.double() - reference.double()).norm(dim=-1)
    norms = reference.double().norm(dim=-1)
    floor = 0.1 * norms.square().mean().sqrt()
    return float((difference / torch.maximum(norms, floor).clamp(min=_ROUNDED_ZERO)).max())
