"""A forward pass of a model that is never whole in memory: every block's weights are read when it runs.

The model stays on the meta device. A block, or a layer outside of all blocks, gets its weights just before it is called
and gives them back just after, so a pass needs the memory of one block beside the activations. Slow where it is called
often; made for the one batch by which two sets of weights are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.model.slices import shared_names

Read = Callable[[str], Tensor]
BATCH, LENGTH = 2, 16


class _Holder:
    """The tensors that a module needs while it runs: parameters and saved buffers, by owner, key and name."""

    def __init__(self, tensors: list[tuple[nn.Module, str, str]], read: Read, dtype: torch.dtype) -> None:
        self.tensors, self.read, self.dtype = tensors, read, dtype

    def enter(self, *_: Any) -> None:
        for owner, key, name in self.tensors:
            value = self.read(name)
            value = value.to(self.dtype) if value.is_floating_point() else value
            if key in owner._parameters:
                owner._parameters[key] = nn.Parameter(value, requires_grad=False)
            else:
                owner._buffers[key] = value

    def leave(self, *_: Any) -> None:
        for owner, key, _name in self.tensors:
            held: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
            value = held[key].to("meta")
            held[key] = nn.Parameter(value, requires_grad=False) if held is owner._parameters else value


@torch.no_grad()
def streamed_logits(blueprint: Blueprint, read: Read, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits [b, s, vocab] of ids [b, s], all computed in ``dtype``; ``read`` gives tensors by canonical name."""
    with torch.device("meta"):
        model = blueprint.build()
    aliases = shared_names(model)
    model.eval()
    for module in model.modules():
        for key in module._non_persistent_buffers_set:
            if (buffer := module._buffers[key]) is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
    blueprint.restore(model)
    inside: set[nn.Module] = set()
    for unit in blueprint.units(model):
        inside |= set(unit.modules())
    paths = {module: path for path, module in model.named_modules()}
    for module in [*blueprint.units(model), *(m for m in model.modules() if m not in inside)]:
        found = [
            (owner, key, aliases.get(name, name))
            for owner in (module.modules() if module in inside else [module])
            for key, name in _saved(owner, paths[owner])
        ]
        if found:
            holder = _Holder(found, read, dtype)
            module.register_forward_pre_hook(holder.enter)
            module.register_forward_hook(holder.leave)
    return blueprint.logits(model, ids)


def _saved(module: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """Keys and names of what a module itself owns of a model's saved tensors."""
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and key not in module._non_persistent_buffers_set:
            yield key, f"{path}.{key}" if path else key


def greatest_difference(
    one: tuple[Blueprint, Read], other: tuple[Blueprint, Read], dtype: torch.dtype
) -> tuple[float, float]:
    """Between the logits of two models for one fixed batch, and the greatest logit of the first."""
    vocab = one[0].vocab or 1
    ids = torch.randint(vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    first, second = (streamed_logits(*model, ids, dtype) for model in (one, other))
    return float((first - second).abs().max()), float(first.abs().max())
