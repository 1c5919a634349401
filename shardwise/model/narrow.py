"""The dtype in which a model computes without training: that of its weights, but not of its tables.

Rotary frequencies in 16 bits are off by up to 2⁻⁹, so angles at position 4,000 by several radians. A router's bias in
16 bits chooses other experts. Training keeps both in fp32, and transformers loads them so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.runtime.torch_private import cast_floats, non_persistent_buffers


def narrow(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a model's weights in ``dtype``, except for the tensors that transformers keeps in fp32."""
    cast_floats(model, dtype, [*_tables(model), *_kept_precise(model, dtype)])
    return model


def _tables(model: nn.Module) -> Iterator[Tensor]:
    """Buffers that no file has. Those of our own models are all kept."""
    ours = not any(hasattr(module, "_keep_in_fp32_modules_strict") for module in model.modules())
    for module in model.modules():
        unsaved = non_persistent_buffers(module)
        yield from (buffer for name, buffer in module.named_buffers(recurse=False) if ours or name in unsaved)


def _kept_precise(model: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    """The tensors that classes of transformers name: some for every narrow dtype, some for fp16 alone."""
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
    globs = {glob for module in model.modules() for key in lists for glob in getattr(module, key, None) or ()}
    if dtype.itemsize > 2 or not globs:
        return
    pattern = re.compile("|".join(glob.replace("*", ".*") for glob in sorted(globs)))
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    yield from (tensor for name, tensor in tensors if pattern.search(name))
