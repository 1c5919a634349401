"""Adapters of experts in PEFT's files: their names and layouts there, and here.

PEFT 0.19 to 0.21 adapt a 3-D parameter that ``target_parameters`` names by a wrapper around its module, and a second
parameter of the module by a wrapper around the first. So their names are those of the wrappers:

    experts.gate_up_proj_lora_A [E, r, i]      experts.base_layer.lora_A.weight [E · r, i]
    experts.gate_up_proj_lora_B [E, o, r]      experts.base_layer.lora_B.weight [o, r · E], the expert varying fastest
    experts.down_proj_lora_A                   experts.lora_A.weight

The innermost wrapper is of the parameter that the module defines first. DoRA's magnitudes [E, o] are named likewise,
``experts.lora_magnitude_vector``; PEFT refuses them, because it has no DoRA of parameters.

In ``target_modules`` of a mixture, PEFT takes names such as ``gate_proj`` for the experts' of transformers 4 and
rewrites the config. So linear layers with these names, of shared experts and dense blocks, are in
``target_parameters``, with their weight. The tensors have the same names and shapes there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from shardwise.model.expert_lora import (
    EXPERT_A,
    EXPERT_B,
    EXPERT_MAGNITUDE,
    EXPERT_WEIGHTS,
    expert_adapter,
)
from shardwise.recipe.sections import AdapterSpec, by_pattern

_FORMER = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last names that PEFT 0.21 rewrites."""
_ENDS = {
    "lora_A.weight": EXPERT_A,
    "lora_B.weight": EXPERT_B,
    EXPERT_MAGNITUDE.removeprefix("_"): EXPERT_MAGNITUDE,
}
"""Of the names of an adapter's tensors, there and here."""
_WRAPPER = re.compile(rf"(.+?)((?:\.base_layer)*)\.({'|'.join(map(re.escape, _ENDS))})")


def are_known(names: Collection[str]) -> bool:
    """Whether parameters that PEFT targets can be stacks of experts, or weights of linear layers."""
    return all(str(name).rpartition(".")[2] in (*EXPERT_WEIGHTS, "weight") for name in names)


def is_rewritten(path: str, spec: AdapterSpec) -> bool:
    """Whether a linear layer of a mixture has a name that PEFT takes for a former expert's."""
    return path.rpartition(".")[2] in _FORMER and spec.name == "lora" and not spec.lora_bias


def with_patterns(config: dict[str, Any], renamed: Collection[str]) -> dict[str, Any]:
    """A config in which ranks and alphas of single layers also match the weights of these layers."""
    for key in ("rank_pattern", "alpha_pattern"):
        # PEFT matches a pattern with the parameter's path, which has a ``.weight`` that the layer's lacks.
        matched = {path: by_pattern(config[key], path, None) for path in sorted(renamed)}
        config[key] |= {f"{re.escape(path)}.weight": value for path, value in matched.items() if value}
    return config


def targets_parameter(config: Mapping[str, Any], path: str) -> bool:
    """Whether PEFT adapts the parameter at ``path``."""
    names = config.get("target_parameters") or ()
    return any(path == name or path.endswith(f".{name}") for name in names)


def names_here(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], rank: Callable[[str], int]
) -> dict[str, str]:
    """Names of the experts' adapters, by their names in the file; both without PEFT's prefix.

    Args:
        shapes: of the file's tensors. rank: that of the layer at a path. A linear layer's A has as many rows.
    """
    renames: dict[str, str] = {}
    for name in shapes:
        if (match := _WRAPPER.fullmatch(name)) is None:
            continue
        owner = match[1]
        depth = match[2].count(".")
        stacks = [f"{owner}.{last}" for last in EXPERT_WEIGHTS]
        targets = [stack for stack in stacks if targets_parameter(config, stack)]
        # A linear layer that is called like a stack's module has an A of r rows; experts have one of E · r.
        rows = shapes.get(_wrapper(owner, depth, "lora_A.weight"), ())[:1]
        if depth < len(targets) and (depth > 0 or rows != (rank(owner),)):
            renames[name] = (
                targets[-1 - depth] + _ENDS[match[3]]
            )  # the outermost wrapper is of the last target
    return renames


def _wrapper(owner: str, depth: int, end: str) -> str:
    return f"{owner}{'.base_layer' * depth}.{end}"


def names_there(names: Collection[str]) -> dict[str, str]:
    """Names in PEFT's files of the experts' adapters among these tensors, without PEFT's prefix."""
    renames: dict[str, str] = {}
    for name in names:
        if (adapter := expert_adapter(name)) is None:
            continue
        owner, _, last = adapter[0].rpartition(".")
        # Each adapted parameter that the module defines later wraps this one once more.
        outer = EXPERT_WEIGHTS[EXPERT_WEIGHTS.index(last) + 1 :]
        depth = sum(1 for other in outer if f"{owner}.{other}{EXPERT_A}" in names)
        renames[name] = _wrapper(owner, depth, next(end for end, here in _ENDS.items() if here == adapter[1]))
    return renames


def shape_here(name: str, stored: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The shape of an expert adapter's parameter from that in the file; the same if it does not fit the rank."""
    if name.endswith(EXPERT_MAGNITUDE):
        return stored
    if len(stored) != 2:
        return stored
    is_a = name.endswith(EXPERT_A)
    joined, width = stored if is_a else (stored[1], stored[0])  # [E · r, i] of A, [o, r · E] of B
    if joined % rank:
        return stored
    experts = joined // rank
    return (experts, rank, width) if is_a else (experts, width, rank)


def layout_here(name: str, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the file as the parameter of this shape."""
    if not name.endswith(EXPERT_B):
        return stored.view(shape)
    experts, width, rank = shape
    # Contiguous: the kernel of grouped products takes no other layout.
    return stored.view(width, rank, experts).permute(2, 0, 1).contiguous()


def layout_there(name: str, tensor: Tensor) -> Tensor:
    """A parameter as PEFT's tensor."""
    if name.endswith(EXPERT_MAGNITUDE):
        return tensor
    if name.endswith(EXPERT_A):
        return tensor.reshape(-1, tensor.shape[2])
    return tensor.permute(1, 2, 0).reshape(tensor.shape[1], -1)
