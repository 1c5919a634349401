"""Kinds of devices, and the properties of every device of a kind. No torch.

A new kind is an entry here, a profile, and a target of dry runs (dryrun/target.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceKind:
    """One kind.

    Attributes:
        name: in profiles and recipes.
        torch_type: of ``torch.device``.
        collectives: the backend of ``torch.distributed``.
        is_host: whether it is the processor of the host. Then its memory is the host's, calls return when their
            kernel has ended, and PyTorch emulates dtypes without hardware support.
        overlaps: whether collectives run next to kernels.
        reserve: share of the capacity left free for memory that neither the dry run nor the replayed allocator sees.
            Kernels allocate workspaces while they run: the fp32 sums of flash attention's backward pass take 128 MiB
            for 8,192 tokens of 4,096 channels. The sizes of context and communicators are table values, and real
            ones vary.
        allocator: the settings that runs have unless a variable of the environment names others.
        spread: the devices among which predictions were compared with published runs (planner/accuracy.toml); "" for
            none.
        plan_only: whether Shardwise plans for it and cannot train on it.
    """

    name: str
    torch_type: str
    collectives: str
    is_host: bool
    overlaps: bool
    reserve: float
    allocator: str
    spread: str
    plan_only: bool = False


_CUDA = DeviceKind("cuda", "cuda", "nccl", False, True, 0.02, "expandable_segments:True", "accelerator")

DEVICE_KINDS: Mapping[str, DeviceKind] = {
    "cpu": DeviceKind("cpu", "cpu", "gloo", True, False, 0.0, "", "cpu"),
    "cuda": _CUDA,
    # Expandable segments leave one segment per stream and pool, with fewer fragments; on ROCm they are newer.
    "rocm": replace(_CUDA, name="rocm", allocator=""),
    # Apple's GPUs. torch.distributed has no collectives for them.
    "mps": DeviceKind("mps", "mps", "", False, False, 0.0, "", "", plan_only=True),
}

HOST = DEVICE_KINDS["cpu"]


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device of this process."""
    import torch

    if device.type == "cuda":
        return DEVICE_KINDS["rocm" if torch.version.hip else "cuda"]
    return DEVICE_KINDS[device.type]


def before_ampere(device: torch.device) -> bool:
    """Whether a device of this process is an NVIDIA GPU of a compute capability below 8.0."""
    import torch

    return kind_of(device) is _CUDA and torch.cuda.get_device_capability(device) < (8, 0)


def accelerator_here() -> DeviceKind:
    """The kind of this machine's accelerators; the host's where there is none."""
    import torch

    return kind_of(torch.device("cuda")) if torch.cuda.is_available() else HOST
