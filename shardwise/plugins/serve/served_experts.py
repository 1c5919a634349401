"""Adapters of experts: a mixture's module as each adapter has it, and the hook that runs it on that adapter's tokens.

An adapted module shares the base's weights and has its own A and B. The base's module runs too, for the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError
from shardwise.model.expert_lora import (
    EXPERT_A,
    EXPERT_B,
    EXPERT_MAGNITUDE,
    AdaptedExperts,
    adaptable_stacks,
    as_adapted,
    expert_adapter,
    stack_shape,
)
from shardwise.plugins.serve.adapters import ServedAdapter
from shardwise.runtime.parallel.experts import ARGUMENTS


class ServedExperts:
    """The adapters of one module of experts, and the hook that replaces its output for their requests.

    Args:
        selected: the names of the requests of the current batch.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        adapters: Sequence[ServedAdapter],
        dtype: torch.dtype,
        selected: Callable[[], tuple[str, ...]],
    ) -> None:
        self._path, self._selected = path, selected
        having = [adapter for adapter in adapters if path in adapter.mixtures]
        self._adapted = {adapter.name: _with_adapter(path, module, adapter, dtype) for adapter in having}
        module.register_forward_hook(self)

    @property
    def nbytes(self) -> int:
        return sum(
            parameter.nbytes
            for module in self._adapted.values()
            for name, parameter in module.named_parameters(recurse=False)
            if expert_adapter(name) is not None
        )

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        names = self._selected()
        if not self._adapted.keys() & set(names):
            return out
        if len(args) != ARGUMENTS or len(out) % len(names):
            raise RecipeError(
                "this model cannot serve adapters of experts",
                where=self._path,
                why="its experts are not called with the tokens of whole requests, indices and weights",
                fix="merge the adapter: shardwise merge",
            )
        if len(set(names)) == 1:
            return self._run(names[0], args)
        out, length = out.clone(), len(out) // len(names)
        for name in self._adapted.keys() & set(names):
            asked = torch.tensor([other == name for other in names], device=out.device)
            tokens = asked.repeat_interleave(length)
            out[tokens] = self._run(name, tuple(value[tokens] for value in args))
        return out

    def _run(self, name: str, args: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = self._adapted[name](*args)
        return out


def _with_adapter(path: str, module: nn.Module, adapter: ServedAdapter, dtype: torch.dtype) -> AdaptedExperts:
    """A module with the base's weights and this adapter."""
    weights: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    adapted = as_adapted(deepcopy(module, weights))
    for stack in [stack for stack in adapter.stacks if stack.rpartition(".")[0] == path]:
        name = stack.rpartition(".")[2]
        adapted.add_adapter(name, adapter.stacks[stack][0][1], adapter.scales[stack], dtype, adapter.turns)
        for end in (EXPERT_A, EXPERT_B, *([EXPERT_MAGNITUDE] if adapter.turns else [])):
            adapted.get_parameter(name + end).data.copy_(adapter.values(stack + end))
    return adapted.requires_grad_(False)


def require_experts(adapter: ServedAdapter, modules: Mapping[str, nn.Module]) -> None:
    """Raise CheckpointError unless the model has every stack of experts of an adapter, with the same shape."""
    for stack, (a, b) in adapter.stacks.items():
        path, _, name = stack.rpartition(".")
        module = modules.get(path, nn.Module())
        there = [a[0], b[1], a[2]]
        why = f"its {stack} is no stack of experts of this model"
        if isinstance(module, AdaptedExperts) or name in adaptable_stacks(module):
            here = list(stack_shape(module, name))
            why = "" if here == there else f"{stack} is {there} in the adapter and {here} in this model"
        if why:
            fix = "give the base it was trained on"
            raise CheckpointError("the adapter is for another base", where=adapter.where, why=why, fix=fix)
