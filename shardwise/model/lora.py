"""LoRA: beside a frozen linear layer a product of two thin ones, which alone is trained (Hu et al. 2021).

    lora   h = W x + b + scale · B A x      W [o, i] frozen, A [r, i], B [o, r]
    dora   h = m / |W + scale · B A| · (W x + scale · B A x) + b, m [o] and the norm of every row [o] (Liu et al. 2024)

with scale alpha / r, or rank-stabilised alpha / √r. A starts as torch starts a linear layer (uniform within 1 / √i,
which is PEFT's kaiming with a = √5), B at zero and m at the norm of W's rows, so an adapted model starts as the model
that it adapts. The norm counts as a constant in the backward pass (section 4.3 of the paper).

An adapted layer keeps the names of what it replaces: ``q_proj.weight`` stays, and ``q_proj.lora_A.weight`` and
``q_proj.lora_B.weight`` come beside it. Weight files, seeds, plans of tensor parallelism and checkpoints thus find what
they know. A and B are linear layers of their own (PEFT's names), so that whoever divides layers divides them too. A
frozen weight may be packed (quantized.py): then ``packed`` is there in the place of ``weight``.

The scale is multiplied into A x, r values a token, and not into the o values of the result. Refused: merging B A into W
for every forward pass, which keeps a full-size product per layer for the backward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.sections import AdapterSpec
from shardwise.model.quantized import Packing, linear
from shardwise.model.slices import shared_names
from shardwise.model.split import take_over

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
"""The names of what lies below an adapted layer: two layers, and DoRA's vector."""

PACKED = "packed"
"""The name of a packed weight."""


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its canonical name, is an adapter's."""
    return f".{A}." in name or f".{B}." in name or name.endswith(MAGNITUDE)


class FrozenLinear(nn.Linear):
    """A linear layer that is not trained. Takes over the weight and bias of the layer that it replaces.

    ``transposed``: the weight is stored as [i, o], as GPT-2's ``Conv1D`` of transformers has it. ``packing``: how the
    weight is packed, if it is; always as [o, i].
    """

    packed: nn.Parameter

    def __init__(self, layer: nn.Module, quantize: str) -> None:
        weight = layer.get_parameter("weight")
        self.transposed = type(layer) is not nn.Linear
        rows, columns = reversed(weight.shape) if self.transposed else weight.shape
        super().__init__(columns, rows, bias=False, device="meta")
        take_over(self, layer)
        self.requires_grad_(False)
        self.packing = None if quantize == "none" else Packing(quantize, rows, columns)
        if self.packing is not None:
            codes = torch.empty(self.packing.shape, dtype=torch.uint8, device=weight.device)
            self.register_parameter(PACKED, nn.Parameter(codes, requires_grad=False))
            self._parameters["weight"] = None
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        if self.packing is not None:
            return linear(input, self.packed, self.bias, self.packing)
        return F.linear(input, self.weight.t() if self.transposed else self.weight, self.bias)

    def plain_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight [o, i]."""
        if self.packing is not None:
            return self.packing.unpack(self.packed, dtype)
        return (self.weight.t() if self.transposed else self.weight).to(dtype)


class LoraLinear(FrozenLinear):
    """A frozen linear layer with an adapter."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_magnitude_vector: nn.Parameter | None

    def __init__(self, layer: nn.Module, spec: AdapterSpec) -> None:
        weight = layer.get_parameter("weight")
        super().__init__(layer, spec.quantize)
        self.dropout, rank = spec.dropout, spec.rank
        self.scale = spec.alpha / (math.sqrt(rank) if spec.rank_stabilized else rank)
        where, dtype = weight.device, weight.dtype
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, device=where, dtype=dtype)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, device=where, dtype=dtype)
        magnitude = None
        if spec.name == "dora":
            magnitude = nn.Parameter(torch.empty(self.out_features, device=where, dtype=dtype))
        self.register_parameter(MAGNITUDE, magnitude)

    def forward(self, input: Tensor) -> Tensor:
        thin = self.lora_A(F.dropout(input, self.dropout, self.training))
        out = super().forward(input) + self.lora_B(thin * self.scale)
        if self.lora_magnitude_vector is None:
            return out
        share = self.lora_magnitude_vector / self._norms(input.dtype)
        # As a change of the sum, which at the start is zero to the bit.
        return out + (share - 1) * (out if self.bias is None else out - self.bias)

    @torch.no_grad()
    def _norms(self, dtype: torch.dtype) -> Tensor:
        """Of the rows of the weight with its adapter, [o]."""
        weight = self.plain_weight(dtype)
        return row_norms(torch.addmm(weight, self.lora_B.weight, self.lora_A.weight, alpha=self.scale))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.lora_A.out_features}, scale={self.scale:g}"


def row_norms(weight: Tensor) -> Tensor:
    """The norms of the rows of a weight [o, i], taken in fp32 or wider, in its dtype."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    # Of one layout, so that equal weights have norms that are equal to the bit.
    return torch.linalg.vector_norm(weight.contiguous(), dim=1, dtype=wide).to(weight.dtype)


def weights_in(model: nn.Module) -> int:
    """How many weights a model has, undivided; of packed ones those that they stand for, not their bytes."""
    layers = [layer for layer in model.modules() if isinstance(layer, FrozenLinear)]
    packed = [(layer.packing, layer.packed.numel()) for layer in layers if layer.packing is not None]
    plain = sum(parameter.numel() for parameter in model.parameters())
    return plain + sum(packing.rows * packing.columns - size for packing, size in packed)


# ---- which layers -----------------------------------------------------------------------------------------


def adapt(model: nn.Module, units: Sequence[nn.Module], spec: AdapterSpec) -> list[str]:
    """Freeze a model and put adapters on the layers of its units that are targets; their paths.

    Without ``units`` all linear layers of the model may be targets. What is no target is packed too, where the recipe
    asks for that.
    """
    model.requires_grad_(False)
    paths = list(linear_layers(model, units))
    targets = [path for path in paths if is_targeted(path, spec.targets)]
    for path in targets:
        model.set_submodule(path, LoraLinear(model.get_submodule(path), spec))
    if spec.quantize != "none":
        for path in sorted(set(paths) - set(targets)):
            model.set_submodule(path, FrozenLinear(model.get_submodule(path), spec.quantize))
    return targets


def linear_layers(model: nn.Module, units: Sequence[nn.Module]) -> Iterator[str]:
    """Paths of the plain linear layers below the units, or of all, whose weights are their own.

    Subclasses are left out: they may not call their own forward.
    """
    inside = {module for unit in units or [model] for module in unit.modules()}
    aliases = shared_names(model)
    shared = aliases.keys() | aliases.values()
    for path, module in model.named_modules():
        plain = type(module) is nn.Linear or _is_conv1d(module)
        if path and plain and module in inside and f"{path}.weight" not in shared:
            yield path


def require_targets(model: nn.Module, units: Sequence[nn.Module], spec: AdapterSpec) -> None:
    """Raise RecipeError for a target that is no linear layer of the units; ``model`` has not been adapted."""
    paths = list(linear_layers(model, units))
    targets = spec.targets if isinstance(spec.targets, tuple) else (spec.targets,)
    for target in targets:
        kind = (target,) if isinstance(spec.targets, tuple) else target
        if not any(is_targeted(path, kind) for path in paths):
            names = sorted({path.rpartition(".")[2] for path in paths})
            raise RecipeError(
                f"no linear layer of the model's blocks is {target!r}",
                where="adapter.targets",
                why=f"their names are {', '.join(names)}" if names else "there is no linear layer",
                fix="name some of these, or take attention, mlp or all",
            )


def is_targeted(path: str, targets: str | tuple[str, ...]) -> bool:
    """Whether a layer is meant: by a word, by the last parts of its path, or by an expression for all of it."""
    if isinstance(targets, tuple):
        return any(path == name or path.endswith(f".{name}") for name in targets)
    if targets == "all":
        return True
    if targets in ("attention", "mlp"):
        return _in_attention(path) == (targets == "attention")
    return re.fullmatch(targets, path) is not None


def _in_attention(path: str) -> bool:
    """By the names that models give it: self_attn, attn, attention, SelfAttention, EncDecAttention."""
    return any("attn" in part or "attention" in part for part in path.lower().split("."))


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' linear layer with a transposed weight, told without importing transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
