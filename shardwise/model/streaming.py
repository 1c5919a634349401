"""A forward pass that reads each block's weights from disk when the block runs.

The model stays on the meta device. A block, or a layer outside the blocks, gets its weights before its call and frees
them after it. It is slow and serves the one batch that compares two sets of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.runtime.parallel.shard_slices import shared_names
from shardwise.runtime.torch_private import non_persistent_buffers

Read = Callable[[str], Tensor]
BATCH, LENGTH = 2, 16


class _StreamedTensors:
    """Parameters and saved buffers of a module, loaded while it runs: (owner, key, canonical name)."""

    def __init__(self, tensors: list[tuple[nn.Module, str, str]], read: Read, dtype: torch.dtype) -> None:
        self.tensors, self.read, self.dtype = tensors, read, dtype

    def load(self, *_: Any) -> None:
        for owner, key, name in self.tensors:
            value = self.read(name)
            value = value.to(self.dtype) if value.is_floating_point() else value
            if key in owner._parameters:
                owner._parameters[key] = nn.Parameter(value, requires_grad=False)
            else:
                owner._buffers[key] = value

    def free(self, *_: Any) -> None:
        for owner, key, _name in self.tensors:
            held: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            value = held[key].to("meta")
            held[key] = nn.Parameter(value, requires_grad=False) if held is owner._parameters else value


@torch.no_grad()
def streamed_logits(blueprint: Blueprint, read: Read, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [b, s, vocab] of ids [b, s], computed in ``dtype``; ``read`` returns tensors by canonical name."""
    with torch.device("meta"):
        model = blueprint.build()
    aliases = shared_names(model)
    model.eval()
    for module in model.modules():
        for key in non_persistent_buffers(module):
            if (buffer := module._buffers[key]) is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
    blueprint.restore(model)
    inside: set[nn.Module] = set()
    for block in blueprint.blocks(model):
        inside |= set(block.modules())
    paths = {module: path for path, module in model.named_modules()}
    for module in [*blueprint.blocks(model), *(m for m in model.modules() if m not in inside)]:
        found = [
            (owner, key, aliases.get(name, name))
            for owner in (module.modules() if module in inside else [module])
            for key, name in _saved(owner, paths[owner])
        ]
        if found:
            streamed = _StreamedTensors(found, read, dtype)
            module.register_forward_pre_hook(streamed.load)
            module.register_forward_hook(streamed.free)
    return blueprint.logits(model, ids)


def _saved(module: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """Keys and names of the saved tensors that a module itself owns."""
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and key not in non_persistent_buffers(module):
            yield key, f"{path}.{key}" if path else key


def max_logit_difference(
    one: tuple[Blueprint, Read], other: tuple[Blueprint, Read], dtype: torch.dtype
) -> tuple[float, float]:
    """(largest difference between the logits of two models on one fixed batch, largest logit of the first)."""
    vocab = one[0].vocab or 1
    ids = torch.randint(vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    first, second = (streamed_logits(*model, ids, dtype) for model in (one, other))
    return float((first - second).abs().max()), float(first.abs().max())
