"""Values of a model with adapters, where the model below knows only of its own plain weights.

``bare`` hides adapters and packed weights from it. What is packed is filled a block at a time: the block's layers as
plain fp32 weights in a tree of their own, under their names, which the model below fills as it fills any part; each
rank packs its rows of them. So every rank draws or reads all of a block's weights and keeps its rows: the price of
scales that do not depend on who packs, and of a form that needs no weight to be there as a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.model.lora import MAGNITUDE, PACKED, A, B, FrozenLinear, LoraLinear, row_norms
from shardwise.model.slices import canonical_name, local_part, local_slices


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Within it the model has neither adapters nor packed weights."""
    hidden: list[tuple[FrozenLinear, dict[str, nn.Module | None], dict[str, nn.Parameter | None]]] = []
    for layer in [module for module in model.modules() if isinstance(module, FrozenLinear)]:
        modules = {name: layer._modules.pop(name) for name in (A, B) if name in layer._modules}
        held = {
            name: layer._parameters.pop(name) for name in (PACKED, MAGNITUDE) if name in layer._parameters
        }
        hidden.append((layer, modules, held))
    try:
        yield
    finally:
        for layer, modules, held in hidden:
            layer._modules.update(modules)
            layer._parameters.update(held)


@torch.no_grad()
def fill_packed(model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
    """Write this rank's part of every packed weight; ``fill`` writes values into any part of the model below."""
    blocks: dict[str, list[tuple[str, FrozenLinear]]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, FrozenLinear) and layer.packing is not None:
            name = canonical_name(f"{path}.")[:-1]
            blocks.setdefault(_block(name), []).append((name, layer))
    for layers in blocks.values():
        tree = nn.Module()
        leaves = [_leaf(tree, name, layer) for name, layer in layers]
        fill(tree)
        for (_, layer), leaf in zip(layers, leaves, strict=True):
            assert layer.packing is not None
            plain = leaf.t() if layer.transposed else leaf
            if (rows := local_slices(layer.packed)[0]).stop > rows.start:
                local_part(layer.packed).copy_(layer.packing.pack(plain, rows))


def _block(name: str) -> str:
    """The path of the block that a layer lies in: up to its number; of a layer in none its own."""
    parts = name.split(".")
    ends = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: ends[0] + 1]) if ends else name


def _leaf(tree: nn.Module, path: str, layer: FrozenLinear) -> Tensor:
    """An undefined plain weight of a layer under its name in a tree."""
    for part in path.split("."):
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    rows, columns = layer.out_features, layer.in_features
    shape = (columns, rows) if layer.transposed else (rows, columns)
    weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=local_part(layer.packed).device))
    tree.register_parameter("weight", weight)
    return weight


@torch.no_grad()
def fill_magnitudes(model: nn.Module) -> None:
    """Let the magnitudes of DoRA be the norms of the rows of the weights, which have their values."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear) and layer.lora_magnitude_vector is not None:
            magnitude = layer.lora_magnitude_vector
            norms = row_norms(_rows(layer, magnitude))
            local_part(magnitude).copy_(norms)


def _rows(layer: LoraLinear, magnitude: Tensor) -> Tensor:
    """The rows of the weight [o, i] that this rank has the magnitudes of."""
    rows = local_slices(magnitude)[0]
    if layer.packing is None and not layer.transposed:
        return local_part(layer.weight)  # divided as the magnitudes are
    if layer.packing is not None:
        return layer.packing.unpack(_whole(layer.packed), magnitude.dtype)[rows]
    return _whole(layer.weight).t()[rows]


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be divided, on the device of its mesh. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part = local_part(tensor).to(tensor.device_mesh.device_type)
    shape, stride = tensor.shape, tensor.stride()
    whole = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return whole.full_tensor()
