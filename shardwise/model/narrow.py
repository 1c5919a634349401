"""The dtype in which a model computes without training: that of its weights, but not of its tables.

Rotary frequencies in 16 bits are off by up to 2⁻⁹, so angles at position 4,000 by several radians. A router's bias in
16 bits chooses other experts. Training keeps both in fp32, and transformers loads them so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.model.unreached import SHOWN, block_pattern
from shardwise.runtime.torch_private import cast_floats, non_persistent_buffers


def narrow(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Store a model's weights in ``dtype``, except for the tensors that transformers keeps in fp32."""
    cast_floats(model, dtype, [*_tables(model), *_fp32_tensors(model, dtype).values()])
    return model


def narrowed(model: nn.Module, compute: str) -> Iterator[str]:
    """A sentence on the parameters that transformers keeps in fp32, and that training computes with in 16 bits.

    Args:
        compute: the dtype of compute: fp64, fp32, bf16 or fp16.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute, torch.float32)
    tensors = _fp32_tensors(model, dtype)
    parameters = [name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)]
    names = list(dict.fromkeys(map(block_pattern, parameters)))
    if names:
        others = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
        risk = ", whose products may overflow: bf16 is safer" if dtype == torch.float16 else ""
        named = ", ".join(names[:SHOWN]) + others
        yield f"transformers keeps {named} in fp32; training computes with {compute} copies{risk}"


def _tables(model: nn.Module) -> Iterator[Tensor]:
    """Buffers that no file has. Those of our own models are all kept."""
    # Every model class of transformers has this attribute, whether or not it names a module.
    ours = not any(hasattr(module, "_keep_in_fp32_modules_strict") for module in model.modules())
    for module in model.modules():
        unsaved = non_persistent_buffers(module)
        yield from (buffer for name, buffer in module.named_buffers(recurse=False) if ours or name in unsaved)


def _fp32_tensors(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that classes of transformers name: some for every narrow dtype, some for fp16 alone."""
    lists = ["_keep_in_fp32_modules_strict"]
    if dtype == torch.float16:
        lists.append("_keep_in_fp32_modules")
    globs = {glob for module in model.modules() for key in lists for glob in getattr(module, key, None) or ()}
    if dtype.itemsize > 2 or not globs:
        return {}
    pattern = re.compile("|".join(glob.replace("*", ".*") for glob in sorted(globs)))
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: tensor for name, tensor in tensors if pattern.search(name)}
