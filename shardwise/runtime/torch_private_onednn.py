"""Private names of PyTorch that tell what oneDNN does on this processor; as in ``torch_private.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def convolution_backend(
    x: Tensor, weight: Tensor, bias: Tensor | None, *form: Any, bias_sizes: Any = None
) -> str:
    """The library that convolves, such as Mkldnn or Slow2d (PyTorch's own); ``???`` for oneDNN's transposed ones.

    ``form``: stride, padding, dilation, transposed, output padding, groups.
    """
    return str(torch._C._select_conv_backend(x, weight, bias, *form, bias_sizes)).rpartition(".")[2]


def onednn_compiles() -> dict[torch.dtype, bool]:
    """16-bit dtypes whose matrix products oneDNN compiles on this processor, and whether it uses AMX tiles."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if not torch.backends.mkldnn.is_available() or not torch.cpu._is_avx512_bf16_supported():
        return {}
    amx = {torch.bfloat16: torch.cpu._is_amx_tile_supported()}
    return {dtype: amx.get(dtype, False) for dtype, known in supported.items() if known()}
