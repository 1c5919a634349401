"""LoRA and DoRA: a frozen linear layer plus a trained low-rank product (Hu et al. 2021).

    lora   h = W x + b + scale · (B A x + c)      W [o, i] frozen, A [r, i], B [o, r]; c [o] with lora_bias
    dora   h = m / |W + scale · B A| · (W x + scale · B A x) + b, m [o] and row norms [o] (Liu et al. 2024)

The scale is alpha / r, or alpha / √r if rank-stabilized. In lora the kernel of the product with B adds it to W x. A is
uniform within 1 / √i (PEFT's kaiming with a = √5), B is zero and m is the row norm of W, so an adapted model starts
equal to its base. The norm is a constant in the backward pass (section 4.3). Dropout is on the inputs of A; in dora
also on those of W in the term (m / |W + scale · B A| - 1) · W x, as in PEFT: a second product with W.

An adapted layer keeps its names and adds linear layers with PEFT's names, ``q_proj.lora_A`` and ``q_proj.lora_B``. So
weight files, seeds, tensor-parallel plans and checkpoints still match, and techniques shard A and B like other layers.
A packed layer (quantized.py) has ``packed`` instead of ``weight``. Experts of a mixture: expert_lora.py.

Refused: merging B A into W in every forward pass, which saves a full-size product per layer for the backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.expert_lora import (
    EXPERT_A,
    EXPERT_B,
    EXPERT_PACKED,
    AdaptedExperts,
    adapt_experts,
    expert_adapter,
    expert_stacks,
    row_norms,
)
from shardwise.recipe.sections import AdapterSpec, Quantize
from shardwise.runtime.layer_replacement import take_over
from shardwise.runtime.parallel.shard_slices import canonical_name, shared_names
from shardwise.runtime.quantization.as_parameter import StoredPacking
from shardwise.runtime.quantized import Packing, linear

# Names below an adapted layer: two linear layers, and DoRA's magnitudes.
A = "lora_A"
B = "lora_B"
MAGNITUDE = "lora_magnitude_vector"

PACKED_BASE = "packed"
"""Name of a packed weight."""


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it every adapted layer computes what its frozen base does."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear | AdaptedExperts)]
    for module in adapted:
        module.adapter_off = True
    try:
        yield
    finally:
        for module in adapted:
            module.adapter_off = False


def is_adapter(name: str) -> bool:
    """Whether a parameter, by canonical name, belongs to an adapter."""
    return side_of(name) is not None or name.endswith(MAGNITUDE)  # also of experts


def side_of(name: str) -> str | None:
    """A or B for a parameter, by canonical name, of one side of an adapter; else None."""
    if (stack := expert_adapter(name)) is not None:
        return {EXPERT_A: A, EXPERT_B: B}.get(stack[1])
    return next((side for side in (A, B) if f".{side}." in name), None)


class FrozenLinear(nn.Linear):
    """A frozen linear layer. Takes over the weight and bias of the layer that it replaces.

    Attributes:
        transposed: the weight is stored as [i, o], as in transformers' ``Conv1D`` (GPT-2).
        packing: format of a packed weight, always [o, i]; None if the weight is not packed.

    Args:
        quantize: none, nf4 or int8. stored: keep the weight as the model's files store it, whatever ``quantize`` is.
    """

    packed: nn.Parameter

    def __init__(self, layer: nn.Module, quantize: str, stored: StoredPacking | None = None) -> None:
        weight = layer.get_parameter("weight")
        self.transposed = not isinstance(layer, nn.Linear)
        rows, columns = reversed(weight.shape) if self.transposed else weight.shape
        # On the meta device: the weight that it would allocate is replaced by the layer's own.
        super().__init__(columns, rows, bias=False, device="meta")
        take_over(self, layer)
        self.requires_grad_(False)
        self.packing: StoredPacking | Packing | None = stored
        if stored is None and quantize != "none":
            self.packing = Packing(quantize, rows, columns)
        if self.packing is not None:
            codes = torch.empty(self.packing.shape, dtype=torch.uint8, device=weight.device)
            self.register_parameter(PACKED_BASE, nn.Parameter(codes, requires_grad=False))
            self._parameters["weight"] = None  # not deleted: ``self.weight`` is None instead of an error
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


class AddedLinear(nn.Linear):
    """A linear layer whose product can be added to another's output by the same kernel."""

    def forward(self, input: Tensor, base: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """``base + scale * W input``, written over ``base`` [rows, o]; without it, the product with the bias."""
        if base is None:
            return super().forward(input)
        thin = input.reshape(-1, input.shape[-1]).to(base.dtype)  # [rows, r]
        return base.addmm_(thin, self.weight.t().to(base.dtype), alpha=scale)


class LoraLinear(FrozenLinear):
    """A frozen linear layer with an adapter.

    Args:
        path: of the layer, for its rank and scale. quantize: as of FrozenLinear.
    """

    lora_A: nn.Linear
    lora_B: AddedLinear
    lora_magnitude_vector: nn.Parameter | None
    adapter_off = False

    def __init__(
        self,
        layer: nn.Module,
        spec: AdapterSpec,
        path: str,
        quantize: str,
        stored: StoredPacking | None = None,
    ) -> None:
        weight = layer.get_parameter("weight")
        super().__init__(layer, quantize, stored)
        self.dropout = spec.dropout
        self.scale = spec.scale(path)
        rank, _ = spec.strength(path)
        device = weight.device
        dtype = weight.dtype
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = AddedLinear(rank, self.out_features, bias=spec.lora_bias, device=device, dtype=dtype)
        magnitude = None
        if spec.name == "dora":
            magnitude = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        self.register_parameter(MAGNITUDE, magnitude)

    def forward(self, input: Tensor) -> Tensor:
        if self.adapter_off:
            return super().forward(input)
        dropped = F.dropout(input, self.dropout, self.training)
        thin = self.lora_A(dropped)
        plain = self.lora_B.bias is None  # the scale is of the bias, too
        if plain and self.lora_magnitude_vector is None:
            # B's kernel adds into the output of W, so no tensor of its size is made for B A x.
            rows = super().forward(input.reshape(-1, input.shape[-1]))
            return self.lora_B(thin, rows, self.scale).view(*input.shape[:-1], rows.shape[-1])
        change = self.lora_B(thin * self.scale) if plain else self.lora_B(thin) * self.scale
        out = super().forward(input) + change
        if self.lora_magnitude_vector is None:
            return out
        share = self.lora_magnitude_vector / self._norms(input.dtype)  # [o]
        whole = out
        if self.dropout and self.training:
            whole = super().forward(dropped) + change
        # Written as a change of the sum, so that it is exactly zero at the start.
        return out + (share - 1) * (whole if self.bias is None else whole - self.bias)

    @torch.no_grad()
    def _norms(self, dtype: torch.dtype) -> Tensor:
        """Row norms of the adapted weight, [o]."""
        weight = self.plain_weight(dtype)
        return row_norms(torch.addmm(weight, self.lora_B.weight, self.lora_A.weight, alpha=self.scale))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.lora_A.out_features}, scale={self.scale:g}"


def weights_in(model: nn.Module) -> int:
    """Global parameter count; a packed weight counts its logical elements."""
    packed = []  # (logical elements, codes)
    for module in model.modules():
        if isinstance(module, FrozenLinear) and module.packing is not None:
            packed.append((module.packing.rows * module.packing.columns, module.packed))
        elif isinstance(module, AdaptedExperts):
            for name, how in module.packings.items():
                codes = module.get_parameter(name + EXPERT_PACKED)
                packed.append((codes.shape[0] * how.matrix.rows * how.matrix.columns, codes))
    plain = sum(parameter.numel() for parameter in model.parameters())
    return plain + sum(logical - codes.numel() for logical, codes in packed)


def packings_in(model: nn.Module) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """Of each weight that the recipe packs: its name, that of the plain weight, and what unpacks some of its rows."""
    packings: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {}
    for wrapped_path, layer in model.named_modules():
        path = canonical_name(f"{wrapped_path}.")[:-1]
        if isinstance(layer, FrozenLinear) and isinstance(layer.packing, Packing):
            packings[f"{path}.{PACKED_BASE}"] = (f"{path}.weight", layer.packing.values_in)
        elif isinstance(layer, AdaptedExperts):
            for name, how in layer.packings.items():
                packings[f"{path}.{name}{EXPERT_PACKED}"] = (f"{path}.{name}", how.values_in)
    return packings


# ---- which layers -----------------------------------------------------------------------------------------

KEYWORDS = ("attention", "mlp", "experts", "all")
"""Values of ``adapter.targets`` that mean linear layers, and stacks of experts, of the blocks."""


def adapt(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    spec: AdapterSpec,
    packings: Mapping[str, StoredPacking] | None = None,
) -> list[str]:
    """Freeze a model and add adapters to the targets; returns their paths. Modules to save stay trained.

    If the recipe quantizes, all linear layers and experts of the blocks, or of the model without ``blocks``, are
    packed. Those of ``packings`` are packed as the model's files store them.
    """
    stored = packings or {}
    # All are listed before the first is replaced: a LoraLinear is no plain linear layer.
    model.requires_grad_(False)
    saved = saved_modules(model, spec)
    targets = target_layers(model, blocks, spec)
    packable = {path for path in linear_layers(model, blocks) if not _is_within(path, saved)}
    stacks = set(expert_stacks(model, []))
    _adapt_mixtures(model, blocks, spec, targets, saved)
    for path in [path for path in targets if path not in stacks]:
        quantize = spec.quantize if path in packable else "none"
        layer = model.get_submodule(path)
        model.set_submodule(path, LoraLinear(layer, spec, path, quantize, stored.get(path)))
    for path in sorted(packable - set(targets)):
        if spec.quantize != "none" or path in stored:
            frozen = FrozenLinear(model.get_submodule(path), spec.quantize, stored.get(path))
            model.set_submodule(path, frozen)
    # The last word: nothing within a saved module was adapted or packed.
    for path in saved:
        model.get_submodule(path).requires_grad_(True)
    return targets


def _adapt_mixtures(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    spec: AdapterSpec,
    targets: Sequence[str],
    saved: Sequence[str],
) -> None:
    """Add adapters to the target stacks of experts, and pack those of the blocks if the recipe quantizes."""
    in_blocks = set(expert_stacks(model, blocks))
    # A module packs both of its stacks or none, so the last one decides.
    owners = dict[str, Quantize]()
    for stack in expert_stacks(model, []):
        packed = stack in in_blocks and not _is_within(stack, saved)
        quantize: Quantize = spec.quantize if packed else "none"
        if stack in targets or quantize != "none":
            owners[stack.rpartition(".")[0]] = quantize
    for owner, quantize in owners.items():
        adapt_experts(model.get_submodule(owner), owner, targets, spec, quantize)


def target_layers(model: nn.Module, blocks: Sequence[nn.Module], spec: AdapterSpec) -> list[str]:
    """Paths of the linear layers, and then of the stacks of experts, that get an adapter: of the blocks by a keyword,
    of the whole model by name, as in PEFT."""
    saved = saved_modules(model, spec)
    within = blocks if spec.targets in KEYWORDS else []
    layers = [path for path in linear_layers(model, within) if is_targeted(path, spec.targets)]
    for stack in expert_stacks(model, within):
        if is_targeted(stack, spec.targets) or is_targeted(stack.rpartition(".")[0], spec.targets):
            layers.append(stack)
    return [path for path in layers if _transformed(path, spec) and not _is_within(path, saved)]


def saved_modules(model: nn.Module, spec: AdapterSpec) -> list[str]:
    """Paths of the modules to train in full: those that end with a name, as PEFT matches them."""
    return [path for path, _ in model.named_modules() if path.endswith(spec.modules_to_save)]


def _is_within(path: str, modules: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def _transformed(path: str, spec: AdapterSpec) -> bool:
    """Whether the block of a layer, the first number in its path, is one to transform."""
    if not spec.layers_to_transform:
        return True
    number = next((part for part in path.split(".") if part.isdecimal()), None)
    return number is not None and int(number) in spec.layers_to_transform


def linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[str]:
    """Paths of the plain linear layers in the blocks, or in the model, without shared weights.

    Other subclasses of ``nn.Linear`` are skipped: they may not call their own forward.
    """
    inside = {module for block in blocks or [model] for module in block.modules()}
    aliases = shared_names(model)
    shared = aliases.keys() | aliases.values()
    for path, module in model.named_modules():
        plain = type(module) is nn.Linear or _is_conv1d(module) or _is_falcons(module)
        if path and plain and module in inside and f"{path}.weight" not in shared:
            yield path


def is_targeted(path: str, targets: str | tuple[str, ...]) -> bool:
    """Whether a layer is a target: by keyword, by the end of its path, or by a regular expression for the path."""
    if isinstance(targets, tuple):
        return any(path == name or path.endswith(f".{name}") for name in targets)
    if targets == "all":
        return True
    if targets == "experts":
        return "experts" in path.split(".")
    if targets in KEYWORDS:
        return _in_attention(path) == (targets == "attention")
    return re.fullmatch(targets, path) is not None


def _in_attention(path: str) -> bool:
    """Models name attention self_attn, attn, attention, SelfAttention, EncDecAttention."""
    return any("attn" in part or "attention" in part for part in path.lower().split("."))


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' ``Conv1D``, without importing transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_falcons(module: nn.Module) -> bool:
    """Whether this is Falcon's ``FalconLinear``: ``nn.Linear``, with the product written out."""
    kind = type(module)
    return kind.__name__ == "FalconLinear" and kind.__module__ == "transformers.models.falcon.modeling_falcon"
