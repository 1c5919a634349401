"""Fills a model that has adapters or packed weights, using the base model's ``fill``.

``without_adapters`` hides adapters and packed weights, which the base does not know. Packed weights are filled one
block at a time: the block's layers become plain fp32 weights in a temporary module, the base fills them, and each rank
packs its rows. So every rank draws or reads all weights of a block, and scales do not depend on the sharding. LoftQ
decomposes one layer after the other there; each rank decomposes all layers of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import Blueprint
from shardwise.model.expert_lora import (
    EXPERT_MAGNITUDE,
    EXPERT_PACKED,
    AdaptedExperts,
    expert_adapter,
    row_norms,
)
from shardwise.model.loftq import loftq
from shardwise.model.lora import MAGNITUDE, PACKED_BASE, A, B, FrozenLinear, LoraLinear
from shardwise.runtime.parallel.shard_slices import canonical_name, gather, local_part, local_slices
from shardwise.runtime.quantization.as_parameter import StoredPacking
from shardwise.runtime.quantized import Packing, StackPacking


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Remove adapters and packed weights from the model inside the context."""
    hidden: list[tuple[nn.Module, dict[str, nn.Module | None], dict[str, nn.Parameter | None]]] = []
    # A list, since popping changes the modules that ``modules()`` walks.
    for layer in [m for m in model.modules() if isinstance(m, FrozenLinear | AdaptedExperts)]:
        modules = {name: layer._modules.pop(name) for name in (A, B) if name in layer._modules}
        parameters = {name: layer._parameters.pop(name) for name in _added_parameters(layer)}
        hidden.append((layer, modules, parameters))
    try:
        yield
    finally:
        for owner, modules, parameters in hidden:
            owner._modules.update(modules)
            owner._parameters.update(parameters)


def _added_parameters(layer: FrozenLinear | AdaptedExperts) -> list[str]:
    """Names of a layer's own parameters that the base does not know."""
    if isinstance(layer, FrozenLinear):
        return [name for name in (PACKED_BASE, MAGNITUDE) if name in layer._parameters]
    return [name for name in layer._parameters if expert_adapter(name) or name.endswith(EXPERT_PACKED)]


@dataclass(frozen=True)
class _PackedWeight:
    """A weight that the recipe packs.

    Attributes:
        name: canonical, of the plain weight. shape: of the plain weight [.., o, i].
        transposed: whether the base has it as [.., i, o].
        packed: the parameter. packing: its format.
        layer: the linear layer that has it; None for experts.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    packed: Tensor
    packing: Packing | StackPacking
    layer: FrozenLinear | None


@torch.no_grad()
def fill_packed(model: nn.Module, base: Blueprint, seed: int, loftq_iterations: int = 0) -> None:
    """Write this rank's rows of every packed weight of an adapted ``base``, and of the adapters that LoftQ starts."""
    _fill_stored(model, base)
    for weights in _packed_blocks(model):
        _fill_block(weights, lambda tree: base.fill(tree, seed), loftq_iterations)


@torch.no_grad()
def rehearse_packed(model: nn.Module, loftq_iterations: int = 0) -> None:
    """Allocate on fake tensors what ``fill_packed`` allocates for the largest block, without weights to read."""
    blocks = _packed_blocks(model)
    if blocks:
        largest = max(blocks, key=lambda weights: sum(weight.packed.numel() for weight in weights))
        _fill_block(largest, lambda tree: None, loftq_iterations)


def _packed_blocks(model: nn.Module) -> list[list[_PackedWeight]]:
    """The weights that the recipe packs, by block."""
    blocks: dict[str, list[_PackedWeight]] = {}
    for path, layer in model.named_modules():
        name = canonical_name(f"{path}.")[:-1]  # a wrapper's prefix ends with a dot
        for weight in _packed_weights(name, layer):
            blocks.setdefault(_block_path(name), []).append(weight)
    return list(blocks.values())


def _packed_weights(path: str, layer: nn.Module) -> Iterator[_PackedWeight]:
    if isinstance(layer, FrozenLinear) and isinstance(layer.packing, Packing):
        shape = (layer.out_features, layer.in_features)
        yield _PackedWeight(f"{path}.weight", shape, layer.transposed, layer.packed, layer.packing, layer)
    elif isinstance(layer, AdaptedExperts):
        for name, how in layer.packings.items():
            packed = layer.get_parameter(name + EXPERT_PACKED)
            stack = (packed.shape[0], how.matrix.rows, how.matrix.columns)
            yield _PackedWeight(f"{path}.{name}", stack, layer.transposed, packed, how, None)


def _fill_block(
    weights: list[_PackedWeight], fill: Callable[[nn.Module], None], loftq_iterations: int
) -> None:
    """Pack this rank's rows of the weights of a block; ``fill`` writes the plain ones into a temporary module."""
    tree = nn.Module()
    leaves = [_leaf(tree, weight) for weight in weights]
    fill(tree)
    for weight, leaf in zip(weights, leaves, strict=True):
        plain = leaf.transpose(-2, -1) if weight.transposed else leaf
        if loftq_iterations and isinstance(weight.layer, LoraLinear):
            assert isinstance(weight.packing, Packing)
            plain = _start_adapter(weight.layer, weight.packing, plain, loftq_iterations)
        # Rows of codes are packed rows of a layer, or experts. A rank may have none.
        if (rows := local_slices(weight.packed)[0]).stop > rows.start:
            local_part(weight.packed).copy_(weight.packing.pack(plain, rows))


def _start_adapter(layer: LoraLinear, packing: Packing, weight: Tensor, iterations: int) -> Tensor:
    """Write LoftQ's A and B of a layer over the default ones; return the part of the weight [o, i] to pack."""
    whole = slice(0, packing.shape[0])
    rest, b, a = loftq(
        weight,
        lambda part: packing.unpack(packing.pack(part, whole), part.dtype),
        layer.lora_A.out_features,
        iterations,
    )
    # Each side is divided by the root of the layer's scale, so that scale · B A is LoftQ's product.
    a = a / math.sqrt(layer.scale)
    b = b / math.sqrt(layer.scale)
    used = a.ne(0).any(1, keepdim=True).expand_as(a)  # with B at zero, the other rows of A keep their default
    shard = local_part(layer.lora_A.weight)
    rows = local_slices(layer.lora_A.weight)
    shard.copy_(torch.where(used[rows], a[rows], shard))
    local_part(layer.lora_B.weight).copy_(b[local_slices(layer.lora_B.weight)])
    return rest


def _fill_stored(model: nn.Module, base: Blueprint) -> None:
    """Weights that stay as the files store them, one after the other."""
    layers = {
        canonical_name(f"{path}.")[:-1]: layer
        for path, layer in model.named_modules()
        if isinstance(layer, FrozenLinear) and isinstance(layer.packing, StoredPacking)
    }
    if not layers:
        return
    read = base.stored_weights()
    for path, layer in layers.items():
        assert isinstance(layer.packing, StoredPacking)
        if (rows := local_slices(layer.packed)[0]).stop > rows.start:
            local_part(layer.packed).copy_(layer.packing.pack_stored(read(path))[rows])


def _block_path(name: str) -> str:
    """The path of a layer's block, up to its number; the layer's own path if it is in no block."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name


def _leaf(tree: nn.Module, weight: _PackedWeight) -> Tensor:
    """Add an undefined plain weight to a module, under its name."""
    *path, name = weight.name.split(".")
    for part in path:
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    device = local_part(weight.packed).device
    shape = (*weight.shape[:-2], *reversed(weight.shape[-2:])) if weight.transposed else weight.shape
    plain = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
    tree.register_parameter(name, plain)
    return plain


@torch.no_grad()
def fill_magnitudes(model: nn.Module, with_adapters: bool = False) -> None:
    """Set DoRA's magnitudes to the row norms of the filled weights, or of W + scale · B A where B is not zero."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear) and layer.lora_magnitude_vector is not None:
            magnitude = layer.lora_magnitude_vector
            rows = _magnitude_rows(layer, magnitude)
            # A is the same for all rows of W; B has a row for each of them.
            if with_adapters:
                a = gather(layer.lora_A.weight)
                b = gather(layer.lora_B.weight)[local_slices(magnitude)[0]]
                rows = torch.addmm(rows, b.to(rows), a.to(rows), alpha=layer.scale)
            local_part(magnitude).copy_(row_norms(rows))
        elif isinstance(layer, AdaptedExperts):
            for name in layer.scales:
                if (of_experts := layer._parameters.get(name + EXPERT_MAGNITUDE)) is not None:
                    magnitudes = local_part(of_experts).split(layer.summed(name))
                    matrices = layer.matrices(name, of_experts.dtype)
                    for of_some, weights in zip(magnitudes, matrices, strict=True):
                        of_some.copy_(row_norms(weights))


def _magnitude_rows(layer: LoraLinear, magnitude: Tensor) -> Tensor:
    """The rows of the weight [o, i] whose magnitudes this rank holds."""
    rows = local_slices(magnitude)[0]
    if layer.packing is None and not layer.transposed:
        return local_part(layer.weight)  # sharded like the magnitudes
    if layer.packing is not None:
        # Packed rows are not the weight's rows, so ranks gather the codes and unpack the whole layer.
        return layer.packing.unpack(gather(layer.packed), magnitude.dtype)[rows]
    return gather(layer.weight).t()[rows]
