"""Merging an adapter into its base weights, and unmerging it, one tensor at a time.

    lora   W' = W + scale · B A                  W = W' - scale · B A      with lora_bias also b' = b + scale · c
    dora   W' = m / n · (W + scale · B A)        W = n / m · W' - scale · B A        n: the norms of the rows of the sum

Computed in fp32, or fp64 for fp64 weights; the writer rounds the result. A merged layer is a plain linear layer, so
its forward pass costs as much as the base's. Quantized weights are dequantized, merged and stay so: quantizing the
sum again would round the adapter away.

Every row of DoRA's W' has the norm m, so unmerging needs the stored norms n. A row with m = 0 cannot be unmerged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard

import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError
from shardwise.model.expert_lora import EXPERT_A, EXPERT_B, EXPERT_MAGNITUDE, EXPERT_PACKED, AdaptedExperts
from shardwise.model.lora import MAGNITUDE, PACKED_BASE, A, B, FrozenLinear, LoraLinear
from shardwise.runtime.accumulation import at_least_fp32

ReadTensor = Callable[[str], Tensor]
"""Reads a whole tensor by canonical name."""


class Merged:
    """Reads the tensors of the plain model from those of a model with adapters.

    Args:
        adapted: the model with its adapters, on the meta device; tensors without an adapter are returned unchanged.
        read: reads the tensors of ``adapted``, including those of adapters.
        with_adapters: whether to merge them; else the frozen base is read.

    Attributes:
        norms: DoRA's row norms by path of the layer or stack of experts, filled while they are read.

    Raises CheckpointError for an adapter that the plain model cannot express.
    """

    def __init__(self, adapted: nn.Module, read: ReadTensor, with_adapters: bool = True) -> None:
        self._read = read
        self._with_adapters = with_adapters
        self.norms: dict[str, Tensor] = {}
        self._frozen = {path: m for path, m in adapted.named_modules() if isinstance(m, FrozenLinear)}
        self._mixtures = {path: m for path, m in adapted.named_modules() if isinstance(m, AdaptedExperts)}
        for path, layer in self._frozen.items():
            if self._merges(layer) and layer.lora_B.bias is not None and layer.bias is None:
                raise CheckpointError(
                    "this adapter cannot be merged",
                    where=path,
                    why="lora_bias gives the layer a bias, and the base's layer has none",
                    fix="serve the adapter on its base: --adapter",
                )

    @property
    def weights(self) -> list[str]:
        """Names of the merged weights: of linear layers, and stacks of experts."""
        if not self._with_adapters:
            return []
        layers = [f"{path}.weight" for path, layer in self._frozen.items() if self._merges(layer)]
        stacks = [f"{path}.{name}" for path, mixture in self._mixtures.items() for name in mixture.scales]
        return layers + stacks

    def _merges(self, layer: FrozenLinear) -> TypeGuard[LoraLinear]:
        return self._with_adapters and isinstance(layer, LoraLinear)

    @property
    def packings(self) -> set[str]:
        """Quantization formats of the weights: nf4, int8."""
        layers = {layer.packing.kind for layer in self._frozen.values() if layer.packing is not None}
        stacks = {how.matrix.kind for m in self._mixtures.values() for how in m.packings.values()}
        return layers | stacks

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        if (mixture := self._mixtures.get(path)) is not None and last in mixture.stacks:
            return self._read_stack(mixture, name, last)
        layer = self._frozen.get(path) if last in ("weight", "bias") else None
        if layer is None:
            return self._read(name)
        if last == "bias":
            bias = self._read(name)
            return bias + added_bias(layer, path, self._read) if self._merges(layer) else bias
        if layer.packing is not None:
            weight = layer.packing.unpack(self._read(f"{path}.{PACKED_BASE}"), torch.float32)
        else:
            stored = self._read(name)
            weight = at_least_fp32(stored.t() if layer.transposed else stored)  # [o, i]
        if self._merges(layer):
            weight = weight + adapter_product(layer, path, self._read).to(weight.dtype)
            if layer.lora_magnitude_vector is not None:
                norms = torch.linalg.vector_norm(weight, dim=1)  # [o]
                self.norms[path] = norms
                weight = weight * (self._read(f"{path}.{MAGNITUDE}").to(norms) / norms).unsqueeze(1)
        return weight.t() if layer.transposed else weight

    def _read_stack(self, mixture: AdaptedExperts, name: str, last: str) -> Tensor:
        if (how := mixture.packings.get(last)) is not None:
            unpacked = how.unpack(self._read(name + EXPERT_PACKED), torch.float32)  # always [E, o, i]
            stack = unpacked.transpose(1, 2) if mixture.transposed else unpacked
        elif last in mixture.scales and self._with_adapters:
            stack = at_least_fp32(self._read(name))
        else:
            return self._read(name)
        if not self._with_adapters:
            return stack
        stack = plus_product(stack, mixture, name, self._read)
        if has_magnitudes(mixture, last):
            norms = torch.linalg.vector_norm(stack, dim=1 if mixture.transposed else 2)  # [E, o]
            self.norms[name] = norms
            stack = turned(stack, self._read(name + EXPERT_MAGNITUDE).to(norms) / norms, mixture)
        return stack


class Unmerged:
    """Reads the base's tensors from those of the merged model and the adapter, with the ``norms`` of ``Merged``."""

    def __init__(self, adapted: nn.Module, read: ReadTensor, norms: Mapping[str, Tensor]) -> None:
        self._read = read
        self._norms = norms
        self._layers = {path: m for path, m in adapted.named_modules() if isinstance(m, LoraLinear)}
        self._mixtures = {path: m for path, m in adapted.named_modules() if isinstance(m, AdaptedExperts)}

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        layer = self._layers.get(path) if last in ("weight", "bias") else None
        stored = self._read(name)
        if (mixture := self._mixtures.get(path)) is not None and last in mixture.scales:
            stack = at_least_fp32(stored)
            # ``Merged`` in the opposite order: first the factors of the rows, then the product.
            if has_magnitudes(mixture, last):
                magnitudes = self._magnitudes(name + EXPERT_MAGNITUDE).to(stack)
                stack = turned(stack, self._norms[name].to(stack) / magnitudes, mixture)
            return plus_product(stack, mixture, name, self._read, -1.0)
        if layer is None:
            return stored
        if last == "bias":
            return stored - added_bias(layer, path, self._read)
        weight = at_least_fp32(stored.t() if layer.transposed else stored)
        if layer.lora_magnitude_vector is not None:
            magnitude = self._magnitudes(f"{path}.{MAGNITUDE}").to(weight)
            weight = weight * (self._norms[path].to(weight) / magnitude).unsqueeze(1)
        weight = weight - adapter_product(layer, path, self._read).to(weight.dtype)
        return weight.t() if layer.transposed else weight

    def _magnitudes(self, name: str) -> Tensor:
        magnitudes = self._read(name)
        if not magnitudes.all():
            raise CheckpointError(
                "the base cannot be restored",
                where=name,
                why="a row's magnitude is zero, so the merged row is zero",
            )
        return magnitudes


def adapter_product(layer: LoraLinear, path: str, read: ReadTensor) -> Tensor:
    """scale · B A, [o, i]."""
    a = at_least_fp32(read(f"{path}.{A}.weight"))  # [r, i]
    b = at_least_fp32(read(f"{path}.{B}.weight"))  # [o, r]
    return (b @ a) * layer.scale


def plus_product(
    stack: Tensor, mixture: AdaptedExperts, name: str, read: ReadTensor, factor: float = 1.0
) -> Tensor:
    """W + factor · scale · B A for the stack of experts of this name, as the base has it; W without an adapter."""
    last = name.rpartition(".")[2]
    if last not in mixture.scales:
        return stack
    a = at_least_fp32(read(name + EXPERT_A)).to(stack)  # [E, r, i]
    b = at_least_fp32(read(name + EXPERT_B)).to(stack)  # [E, o, r]
    # (B A)' = A' B', for a stack that is [E, i, o]
    left, right = (a.transpose(1, 2), b.transpose(1, 2)) if mixture.transposed else (b, a)
    return torch.baddbmm(stack, left, right, alpha=factor * mixture.scales[last])


def has_magnitudes(mixture: AdaptedExperts, stack: str) -> bool:
    """Whether a stack of this name has DoRA's magnitudes."""
    return stack + EXPERT_MAGNITUDE in mixture._parameters


def turned(stack: Tensor, factors: Tensor, mixture: AdaptedExperts) -> Tensor:
    """A stack, as the base has it, with the rows of all experts multiplied by factors [E, o]."""
    return stack * factors.unsqueeze(1 if mixture.transposed else 2)


def added_bias(layer: LoraLinear, path: str, read: ReadTensor) -> Tensor:
    """scale · c, [o]; a zero without one."""
    has_bias = layer.lora_B.bias is not None
    return at_least_fp32(read(f"{path}.{B}.bias")) * layer.scale if has_bias else torch.zeros(())
