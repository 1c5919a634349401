"""Modules of experts with adapters, their inputs, and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from shardwise.model.adapted import AdaptedModel
from shardwise.model.expert_lora import adapt_experts
from shardwise.model.hf import HuggingFaceModel
from shardwise.model.lora import is_adapter
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.parallel.shard_slices import named_parameters
from tests.harness.families import config_of

EXPERTS, WIDTH, CHOICES, RANK = 4, 32, 2, 3
ROWS = 24


def spec(**values: Any) -> AdapterSpec:
    return AdapterSpec(**({"rank": RANK, "alpha": 6.0} | values))


def experts_of(family: str, quantize: str = "none", dtype: torch.dtype = torch.float64, **values: Any) -> Any:
    """An experts module with adapters on both stacks and random values."""
    from shardwise.model.hf.experts import experts_implementation

    config = config_of(family)
    config._experts_implementation = experts_implementation()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    (path,) = [name for name, _ in model.named_modules() if name.endswith("layers.1.mlp.experts")]
    module = model.get_submodule(path).to(dtype).requires_grad_(False)
    adapt_experts(module, "mlp.experts", expert_stacks_of("mlp.experts"), spec(**values), quantize)
    module.to_empty(device="cpu")
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0, 0.3, generator=chance)
    return module


def expert_stacks_of(path: str) -> list[str]:
    return [f"{path}.gate_up_proj", f"{path}.down_proj"]


def routed(dtype: torch.dtype, highest: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices and weights; expert 2 gets no token."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=chance, dtype=dtype).requires_grad_()
    index = torch.randint(highest, (ROWS, CHOICES), generator=chance)
    weights = torch.rand(ROWS, CHOICES, generator=chance, dtype=dtype).requires_grad_()
    return x, index.masked_fill(index == 2, 3), weights


def materialised(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One token and expert after the other, with W + scale · B A; entries beyond the experts are left out."""

    def matrix(name: str, expert: int) -> Tensor:
        stack = getattr(module, name)[expert]
        a, b = getattr(module, f"{name}_lora_A")[expert], getattr(module, f"{name}_lora_B")[expert]
        return (stack.t() if module.is_transposed else stack) + module.scales[name] * b @ a

    def bias(name: str, expert: int) -> Tensor | None:
        return getattr(module, f"{name}_bias")[expert] if module.has_bias else None

    tokens = []
    for token, chosen, shares in zip(x, index.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            if expert < module.num_experts:
                names = ("gate_up_proj", "down_proj")
                wide = F.linear(token, matrix(names[0], expert), bias(names[0], expert))
                inner = module._apply_gate(wide.unsqueeze(0))[0]
                total = total + share * F.linear(inner, matrix(names[1], expert), bias(names[1], expert))
        tokens.append(total)
    return torch.stack(tokens)


def gradients(module: nn.Module, out: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    found = torch.autograd.grad((out * target).sum(), [*inputs, *trained.values()])
    return dict(zip([*"xw", *trained], found, strict=True))


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def pack(module: Any) -> dict[str, Tensor]:
    """Write random packed stacks; returns what they stand for, [E, o, i]."""
    plain = {}
    for name, how in module.packings.items():
        stack = torch.randn(
            EXPERTS, how.matrix.rows, how.matrix.columns, generator=torch.Generator().manual_seed(3)
        )
        packed = module.get_parameter(f"{name}_packed")
        packed.copy_(how.pack(stack, slice(0, EXPERTS)))
        plain[name] = how.unpack(packed, torch.float32)
        assert float((plain[name] - stack).abs().max()) < 0.6 * float(stack.abs().max())
    return plain


def adapted(folder: Path, family: str, **values: Any) -> tuple[AdaptedModel, nn.Module]:
    """A filled model with adapters, whose adapters have random values."""
    blueprint = AdaptedModel(HuggingFaceModel(str(folder), 12), spec(**values))
    model = blueprint.build()
    blueprint.fill(model, 0)
    blueprint.restore(model)
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if is_adapter(name):
                parameter.normal_(0, 0.2, generator=chance)
    return blueprint, model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
