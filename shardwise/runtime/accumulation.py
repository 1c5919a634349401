"""The dtype of sums over 16-bit numbers: fp32, and fp64 for fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this one are summed."""
    return torch.promote_types(dtype, torch.float32)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of its sums."""
    return tensor.to(accumulation_dtype(tensor.dtype))
