"""LoRA, DoRA and quantization of a mixture's experts, which one module holds as stacks of matrices.

    lora   h = W_e x + scale · B_e A_e x for every row x of an expert e     W [E, o, i] frozen, A [E, r, i], B [E, o, r]
    dora   h = m_e / |W_e + scale · B_e A_e| · (W_e x + scale · B_e A_e x)  m [E, o]; the norms [E, o] are constants

Both low-rank products are grouped products of the rows that go to an expert (runtime/row_groups.py), so nothing of the
size of W is allocated; PEFT adds E · o · i values to W in every forward pass. W may be stored as [E, i, o]
(``is_transposed``), and be packed, each expert's matrix on its own; it is unpacked for its product and again for the
gradient, one block's at a time. DoRA's norms take the sums of some experts at a time (``_SUMMED``).

The module is that of transformers' ``use_experts_implementation``, or another with its contract: ``num_experts``,
``gate_up_proj`` or ``up_proj``, ``down_proj``, an activation, and ``_is_expert_parallel``, which says that index
entries of ``num_experts`` are other ranks' experts. It keeps its object and its attributes and gets a subclass of its
class. All new parameters are its own, with one entry per expert, so they are divided over ranks like W.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.accumulation import accumulation_dtype
from shardwise.runtime.grouped_products import plan_grouped_products
from shardwise.runtime.parallel.experts import divisible_experts
from shardwise.runtime.parallel.shard_slices import local_part
from shardwise.runtime.quantized import Packing, StackPacking
from shardwise.runtime.row_groups import (
    RowGroups,
    grouped_linear,
    grouped_low_rank,
    packed_grouped_linear,
)

EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of an experts module's stacks, in the order in which modules define them."""
_LAYOUTS = (("gate_up_proj", "down_proj"), ("up_proj", "down_proj"))
# Ends of the names of the parameters that a stack gets.
EXPERT_A = "_lora_A"
EXPERT_B = "_lora_B"
EXPERT_MAGNITUDE = "_lora_magnitude_vector"
EXPERT_PACKED = "_packed"
_SUMMED = 2**25
"""Values of W + scale · B A that DoRA's norms have in memory at once, or one expert's."""

_ADAPTER = re.compile(rf"(.+\.)?({'|'.join(EXPERT_WEIGHTS)})({EXPERT_A}|{EXPERT_B}|{EXPERT_MAGNITUDE})")


def expert_adapter(name: str) -> tuple[str, str] | None:
    """The path of the adapted stack and the end of the name, of an adapter's parameter; None for others."""
    match = _ADAPTER.fullmatch(name)
    return None if match is None else ((match[1] or "") + match[2], match[3])


class AdaptedExperts(nn.Module):
    """What ``adapt_experts`` adds to the class of an experts module.

    Attributes:
        dropout: on the inputs of A, in training.
        scales: factor of B A x, by name of the adapted stack.
        packings: formats of the packed stacks, always [E, o, i], by name.
        adapter_off: whether only the frozen stacks compute.
    """

    num_experts: int
    dropout: float
    scales: dict[str, float]
    packings: dict[str, StackPacking]
    adapter_off = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module: Any = self
        groups = RowGroups.of(top_k_index, self.num_experts, module._is_expert_parallel)
        first, last = self.stacks
        wide = self._product(first, groups.rows(hidden_states), groups)  # [n, 2 m] with a gate, else [n, m]
        if first == "up_proj":
            inner = module.act_fn(wide)
        elif hasattr(module, "_apply_gate"):
            inner = module._apply_gate(wide)
        else:
            gate, up = wide.chunk(2, dim=-1)
            inner = module.act_fn(gate) * up
        out = self._product(last, inner, groups)  # [n, h]
        return groups.combine(out, top_k_weights).to(hidden_states.dtype)

    def _product(self, name: str, rows: Tensor, groups: RowGroups) -> Tensor:
        # While a block is compiled, or divided, its parameters are plain attributes.
        out = self._frozen_product(name, rows, groups)
        if (scale := self.scales.get(name)) is not None and not self.adapter_off:
            a = getattr(self, name + EXPERT_A)
            b = getattr(self, name + EXPERT_B)
            dropped = F.dropout(rows, self.dropout, self.training)
            change = grouped_low_rank(dropped, a, b, scale, groups)  # [n, o]
            out = out.add_(change)
            if (magnitude := getattr(self, name + EXPERT_MAGNITUDE, None)) is not None:
                whole = out
                if self.dropout and self.training:
                    whole = self._frozen_product(name, dropped, groups) + change
                share = magnitude / self._norms(name, rows.dtype)  # [E, o]
                # A NaN in a row of another rank's expert would reach the gradient of the magnitudes.
                out = out + (share - 1)[groups.experts] * groups.present(whole)
        if getattr(self, "has_bias", False):
            out = out.add_(getattr(self, f"{name}_bias")[groups.experts])
        return groups.present(out)

    def _frozen_product(self, name: str, rows: Tensor, groups: RowGroups) -> Tensor:
        if (how := self.packings.get(name)) is not None:
            return packed_grouped_linear(rows, getattr(self, name + EXPERT_PACKED), how, groups)
        stack = getattr(self, name)
        return grouped_linear(rows, stack.transpose(1, 2) if self.transposed else stack, groups)

    @torch.no_grad()
    def _norms(self, name: str, dtype: torch.dtype) -> Tensor:
        """Norms of the rows of every expert's adapted matrix, [E, o]."""
        experts_at_once = self.summed(name)
        a_parts = getattr(self, name + EXPERT_A).split(experts_at_once)
        b_parts = getattr(self, name + EXPERT_B).split(experts_at_once)
        norms = []
        for weight, b, a in zip(self.matrices(name, dtype), b_parts, a_parts, strict=True):
            norms.append(row_norms(torch.baddbmm(weight, b, a, alpha=self.scales[name])))
        return torch.cat(norms)

    def summed(self, name: str) -> int:
        """Experts whose adapted matrices of a stack are in memory at once."""
        columns = getattr(self, name + EXPERT_A).shape[2]
        rows = getattr(self, name + EXPERT_B).shape[1]
        return max(1, _SUMMED // (rows * columns))

    def matrices(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """The matrices [e, o, i] of this rank's experts in a stack, ``summed`` experts at a time."""
        how = self.packings.get(name)
        stored = local_part(getattr(self, name if how is None else name + EXPERT_PACKED))
        for experts in stored.split(self.summed(name)):
            if how is not None:
                yield how.unpack(experts, dtype)  # codes have one layout, whatever the plain stack's
            else:
                yield (experts.transpose(1, 2) if self.transposed else experts).to(dtype)

    @property
    def transposed(self) -> bool:
        """Whether plain stacks are [E, i, o]."""
        return bool(getattr(self, "is_transposed", False))

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the two stacks."""
        return next(names for names in _LAYOUTS if names[0] in self._parameters)

    def add_adapter(self, name: str, rank: int, scale: float, dtype: torch.dtype, dora: bool) -> None:
        """Give a stack an adapter with undefined values."""
        experts, rows, columns = stack_shape(self, name)
        device = next(self.parameters()).device
        self.scales[name] = scale
        shapes: dict[str, tuple[int, ...]] = {
            EXPERT_A: (experts, rank, columns),
            EXPERT_B: (experts, rows, rank),
        }
        if dora:
            shapes[EXPERT_MAGNITUDE] = (experts, rows)
        for end, shape in shapes.items():
            self.register_parameter(name + end, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))

    def pack(self, name: str, quantize: str) -> None:
        """Replace a stack by a packed one with undefined values."""
        packing = Packing(quantize, *stack_shape(self, name)[1:])
        experts = self.num_experts
        device = self.get_parameter(name).device
        codes = torch.empty(experts, *packing.shape, dtype=torch.uint8, device=device)
        self.register_parameter(name + EXPERT_PACKED, nn.Parameter(codes, requires_grad=False))
        self.packings[name] = StackPacking(packing)
        self._parameters[name] = None  # the key stays, for ``stacks``


def row_norms(weight: Tensor) -> Tensor:
    """Row norms of matrices [.., o, i], computed in at least fp32, returned in their dtype."""
    wide = accumulation_dtype(weight.dtype)
    # One memory layout, so that equal weights have bit-equal norms.
    return torch.linalg.vector_norm(weight.contiguous(), dim=-1, dtype=wide).to(weight.dtype)


def stack_shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    """[E, o, i] of a stack of an experts module, packed or not."""
    if isinstance(module, AdaptedExperts) and (how := module.packings.get(name)) is not None:
        experts = module.get_parameter(name + EXPERT_PACKED).shape[0]
        return experts, how.matrix.rows, how.matrix.columns
    experts, rows, columns = module.get_parameter(name).shape
    return (experts, columns, rows) if getattr(module, "is_transposed", False) else (experts, rows, columns)


# Cached, so that modules of one class keep one class, and their blocks are compiled once.
@cache
def _adapted_class(kind: Any) -> type[nn.Module]:
    """A subclass of the module's class that computes as ``AdaptedExperts``."""
    return type(f"Adapted{kind.__name__}", (AdaptedExperts, kind), {})


def adapt_experts(
    module: nn.Module, path: str, targets: Collection[str], spec: AdapterSpec, quantize: str
) -> None:
    """Add adapters to the ``targets`` among a frozen module's stacks, and pack all stacks if the recipe does.

    Args:
        path: of the module. targets: paths of stacks. quantize: none, nf4 or int8.
    """
    experts = as_adapted(module)
    experts.dropout = spec.dropout
    for name in experts.stacks:
        stack = f"{path}.{name}"
        dtype = experts.get_parameter(name).dtype
        if quantize != "none":
            experts.pack(name, quantize)
        if stack in targets:
            rank = spec.strength(stack)[0]
            dora = spec.name == "dora"
            experts.add_adapter(name, rank, spec.scale(stack), dtype, dora)


def as_adapted(module: nn.Module) -> AdaptedExperts:
    """The module itself, which computes as ``AdaptedExperts`` from now on, without adapters yet."""
    if not isinstance(module, AdaptedExperts):
        kind: Any = type(module)
        module.__class__ = _adapted_class(kind)
        assert isinstance(module, AdaptedExperts)
        module.dropout = 0.0
        module.scales = {}
        module.packings = {}
        plan_grouped_products()
    return module


def adaptable_stacks(module: nn.Module) -> tuple[str, ...]:
    """Names of the stacks of an experts module that can be adapted; () for other modules, and for adapted ones."""
    # An adapted module has more parameters of three dimensions; a packed one has none of the plain ones.
    if isinstance(module, AdaptedExperts):
        return ()
    stacks = tuple(name for name, value in module.named_parameters(recurse=False) if value.dim() == 3)
    if stacks not in _LAYOUTS or not divisible_experts(module):
        return ()
    if getattr(module, "has_post_expert_norm", False):
        return ()  # ``AdaptedExperts.forward`` has no such norm
    computed = hasattr(module, "act_fn") or (stacks[0] == "gate_up_proj" and hasattr(module, "_apply_gate"))
    return stacks if computed else ()


def expert_stacks(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[str]:
    """Paths of the stacks that can be adapted, in the blocks, or in the model."""
    inside = {module for block in blocks or [model] for module in block.modules()}
    for path, module in model.named_modules():
        if module in inside:
            yield from (f"{path}.{name}" for name in adaptable_stacks(module))
