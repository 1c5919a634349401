"""The linear layers and norms of a Llama-shaped block, found by name and checked, and scales folded into them.

    hidden += o(attention(q(n), k(n), v(n)))    with n = input_layernorm(hidden)
    hidden += down(act(gate(n)) * up(n))        with n = post_attention_layernorm(hidden)

The native decoder has this shape, and of transformers Llama, Mistral, Qwen 2 and 3, Gemma 1, Granite and SmolLM3. A
block with other parts is refused: a norm after attention, one norm for both layers, fused projections, experts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError

BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")
ATTENTION_LAYERS = tuple(f"self_attn.{letter}_proj" for letter in "qkvo")
GATE, UP, DOWN = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
_OPTIONAL = {GATE, "self_attn.q_norm", "self_attn.k_norm"}


@dataclass(frozen=True)
class PreNormBlock:
    """The parts of a block. ``gate`` is None if the feed-forward layer has one input projection."""

    input_norm: nn.Module
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    mlp_norm: nn.Module
    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear

    @property
    def attention_inputs(self) -> list[nn.Linear]:
        """The layers that read ``input_norm``."""
        return [self.q, self.k, self.v]

    @property
    def mlp_inputs(self) -> list[nn.Linear]:
        """The layers that read ``mlp_norm``."""
        return [self.up] if self.gate is None else [self.gate, self.up]


def pre_norm_block(block: nn.Module, option: str) -> PreNormBlock:
    """The parts of a Llama-shaped block.

    Raises RecipeError for another block; ``option`` is the argument of the command line that needs the parts.
    """
    modules = {name: module for name, module in block.named_modules() if _has_own_parameters(module)}
    required = {*BLOCK_NORMS, *ATTENTION_LAYERS, UP, DOWN}
    missing = sorted(required - modules.keys())
    foreign = sorted(modules.keys() - required - _OPTIONAL)
    linear = [name for name in (*ATTENTION_LAYERS, GATE, UP, DOWN) if name in modules]
    other = [name for name in linear if not isinstance(modules[name], nn.Linear)]
    why = ""
    if missing:
        why = f"{type(block).__name__} has no {missing[0]}"
    elif foreign:
        why = f"{type(block).__name__} has {foreign[0]}, whose place in the block is not known"
    elif other:
        why = f"{other[0]} is a {type(modules[other[0]]).__name__} and no linear layer"
    if why:
        raise RecipeError(
            "the blocks of this model are not known",
            where=option,
            why=why,
            fix=f"leave out {option}, which knows blocks of Llama's shape",
        )
    parts = {name: modules[name] for name in linear}
    gate = parts.pop(GATE, None)
    # In the order of ``linear``: ATTENTION_LAYERS, UP, DOWN.
    q, k, v, o, up, down = (part for part in parts.values() if isinstance(part, nn.Linear))
    input_norm, mlp_norm = (modules[name] for name in BLOCK_NORMS)
    return PreNormBlock(
        input_norm, q, k, v, o, mlp_norm, gate if isinstance(gate, nn.Linear) else None, up, down
    )


@torch.no_grad()
def fold(previous: nn.Module, layers: Sequence[nn.Linear], scale: Tensor) -> None:
    """Divide what ``layers`` read by a scale [in] per channel and multiply their weights by it; outputs stay.

    Args:
        previous: the norm, or the linear layer, whose output the layers read (a product with other values in between
            is allowed, a nonlinear function is not).
        layers: every reader of that output.
        scale: [in], positive.

    Raises RecipeError for a norm whose gain is not known.
    """
    if isinstance(previous, nn.Linear):
        _set_values(previous.weight, previous.weight.double() / scale.double().unsqueeze(1))
    else:
        set_gain(previous, gain_of(previous) / scale.double())
    # The bias is part of the output that the layers read, so it is divided too.
    bias = getattr(previous, "bias", None)
    if isinstance(bias, Tensor):
        _set_values(bias, bias.double() / scale.double())
    for layer in layers:
        _set_values(layer.weight, layer.weight.double() * scale.double())


def gain_of(norm: nn.Module) -> Tensor:
    """The factors [h] by which a norm multiplies its normalized input, fp64: its weight, or 1 + weight in Gemma.

    Raises RecipeError for a norm whose gain is not known.
    """
    return _weight(norm).detach().double() + norm_offset(norm)


@torch.no_grad()
def set_gain(norm: nn.Module, gain: Tensor) -> None:
    """Give a norm this gain [h]."""
    _set_values(_weight(norm), gain - norm_offset(norm))


@torch.no_grad()
def is_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm has no bias and normalizes to x / rms(x), which commutes with rotations."""
    if getattr(norm, "bias", None) is not None:
        return False
    probe = _norm_probe(norm)
    expected = probe * probe.square().mean(-1, keepdim=True).rsqrt()
    return _is_close(_normalized(norm, probe), expected.double())


@torch.no_grad()
def norm_offset(norm: nn.Module) -> float:
    """0 for a norm that multiplies by its weight, 1 for one that multiplies by 1 + weight, as Gemma's and Nemotron's.

    Measured on a copy, so the norm may be on the meta device; a subclass may compute something else than its base.
    Raises RecipeError for a norm that does neither, whose bias is not added, or with other parameters.
    """
    if type(norm) in (nn.LayerNorm, nn.RMSNorm):
        return 0.0
    parameters = {name for name, parameter in norm._parameters.items() if parameter is not None}
    if parameters <= {"weight", "bias"}:
        probe = _norm_probe(norm)
        draw = torch.Generator().manual_seed(0)
        gain, bias = (1 + torch.rand(_weight(norm).shape, generator=draw) / 2 for _ in range(2))
        output = _output(norm, probe, gain, bias)
        normalized = _normalized(norm, probe)
        added = 0 if getattr(norm, "bias", None) is None else bias.double()
        for offset in (0.0, 1.0):
            if _is_close(output, normalized * (gain + offset) + added):
                return offset
    raise RecipeError(
        f"the gain of a {type(norm).__name__} is not known",
        where="--method",
        why="its output is neither a normalized input times its weight nor times 1 + its weight",
        fix="take a method that leaves norms as they are, such as gptq",
    )


def _norm_probe(norm: nn.Module) -> Tensor:
    """An input [4, h] of a norm, whose mean is not zero."""
    return 1 + torch.randn(4, *_weight(norm).shape, generator=torch.Generator().manual_seed(1))


def _normalized(norm: nn.Module, probe: Tensor) -> Tensor:
    """What a norm multiplies by its gain."""
    one = torch.ones(_weight(norm).shape)
    # The difference of two weights: the bias cancels, and so does the 1 of norms that multiply by 1 + weight.
    return _output(norm, probe, one, one) - _output(norm, probe, 0 * one, one)


def _output(norm: nn.Module, probe: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The output of a copy of a norm with other parameters, in fp32 on the CPU; as fp64."""
    trial = copy.copy(norm)  # not of the tensors, which may be on the meta device, or fake
    values = {"weight": weight, "bias": bias}
    # A new dictionary: the shallow copy shares that of the norm.
    trial._parameters = {}
    for name, parameter in norm._parameters.items():
        replacement = None
        if parameter is not None:
            value = values.get(name, torch.zeros(parameter.shape))
            replacement = nn.Parameter(value, requires_grad=False)
        trial._parameters[name] = replacement
    output: Tensor = trial.forward(probe)  # without hooks, which the copy shares
    return output.double()


def _is_close(output: Tensor, expected: Tensor) -> bool:
    return bool((output - expected).norm() <= 1e-3 * expected.norm())


def _weight(norm: nn.Module) -> nn.Parameter:
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _set_values(parameter: Tensor, value: Tensor) -> None:
    """Replace the values. The old memory may be a mapped file, so it is not written to."""
    parameter.data = value.to(parameter.dtype)


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
