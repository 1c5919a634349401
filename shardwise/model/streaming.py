"""A model on the meta device whose weights are read from disk module by module, while they are needed.

``StreamedModel`` has one set of tensors per block and per layer outside the blocks: ``load`` reads them, ``free`` drops
them. ``streamed_logits`` runs a whole forward pass so, which is slow: it serves the one batch that compares two sets of
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.model.merging import ReadTensor
from shardwise.runtime.parallel.shard_slices import shared_names
from shardwise.runtime.torch_private import non_persistent_buffers

# The size of the batch that compares two sets of weights.
BATCH = 2
COMPARED_TOKENS = 16


class StreamedTensors:
    """Parameters and saved buffers of a module: (owner, key, canonical name). ``load`` and ``free`` fit as hooks."""

    def __init__(
        self, tensors: list[tuple[nn.Module, str, str]], read: ReadTensor, dtype: torch.dtype
    ) -> None:
        self.tensors = tensors
        self.read = read
        self.dtype = dtype
        self._on_meta = [_tensors_with(owner, key)[key] for owner, key, _ in tensors]

    def load(self, *_: Any) -> None:
        for owner, key, name in self.tensors:
            value = self.read(name)
            value = value.to(self.dtype) if value.is_floating_point() else value
            tensors = _tensors_with(owner, key)
            tensors[key] = nn.Parameter(value, requires_grad=False) if tensors is owner._parameters else value

    def free(self, *_: Any) -> None:
        for (owner, key, _name), placeholder in zip(self.tensors, self._on_meta, strict=True):
            _tensors_with(owner, key)[key] = placeholder


class StreamedModel:
    """A model on the meta device, and the tensors of its parts. Buffers that are never saved have their values.

    Attributes:
        blocks: in forward order, each with its tensors.
        outside: modules outside the blocks that own tensors.
        paths: the path of every module.
    """

    def __init__(self, blueprint: Blueprint, read: ReadTensor, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            model = self.model = blueprint.build()
        aliases = shared_names(model)
        model.eval()
        # No file has them, so ``restore`` computes them: on the CPU, and for all of the run.
        for module in model.modules():
            for key in non_persistent_buffers(module):
                if (buffer := module._buffers[key]) is not None:
                    module._buffers[key] = torch.empty_like(buffer, device="cpu")
        blueprint.restore(model)
        paths = {module: path for path, module in model.named_modules()}
        self.paths = paths

        def tensors_of(owners: list[nn.Module]) -> StreamedTensors:
            tensors = [
                (owner, key, aliases.get(name, name))
                for owner in owners
                for key, name in _saved(owner, paths[owner])
            ]
            return StreamedTensors(tensors, read, dtype)

        blocks = blueprint.blocks(model)
        inside = {module for block in blocks for module in block.modules()}
        self.blocks = [(block, tensors_of(list(block.modules()))) for block in blocks]
        outside = [(module, tensors_of([module])) for module in model.modules() if module not in inside]
        self.outside = [(module, streamed) for module, streamed in outside if streamed.tensors]


def _tensors_with(owner: nn.Module, key: str) -> dict[str, Any]:
    """The parameters of a module, or its buffers: those that have this key."""
    return owner._parameters if key in owner._parameters else owner._buffers


@torch.no_grad()
def streamed_logits(blueprint: Blueprint, read: ReadTensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [b, s, vocab] of ids [b, s], computed in ``dtype``; ``read`` returns tensors by canonical name."""
    streamed = StreamedModel(blueprint, read, dtype)
    for module, tensors in [*streamed.blocks, *streamed.outside]:
        module.register_forward_pre_hook(tensors.load)
        module.register_forward_hook(tensors.free)
    return blueprint.logits(streamed.model, ids)


def _saved(module: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """Keys and names of the saved tensors that a module itself owns."""
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and key not in non_persistent_buffers(module):
            yield key, f"{path}.{key}" if path else key


def max_logit_difference(
    one: tuple[Blueprint, ReadTensor], other: tuple[Blueprint, ReadTensor], dtype: torch.dtype
) -> tuple[float, float]:
    """(largest difference between the logits of two models on one fixed batch, largest logit of the first)."""
    vocab = one[0].vocab or 1
    ids = torch.randint(vocab, (BATCH, COMPARED_TOKENS), generator=torch.Generator().manual_seed(0))
    first, second = (streamed_logits(*model, ids, dtype) for model in (one, other))
    return float((first - second).abs().max()), float(first.abs().max())
