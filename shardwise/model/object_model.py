"""A module that Python gives to a run: its structure, and its weights in a file of which each rank reads its slices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.factory import FactoryModel
from shardwise.model.module_checks import require_kept
from shardwise.runtime.parallel.shard_slices import (
    canonical_name,
    local_part,
    local_slices,
    named_parameters,
    share,
    shared_names,
)
from shardwise.runtime.torch_private_parametrize import pickle_parametrized


class GivenModel:
    """What ``model.factory: python:model`` calls: returns (module on the meta device, loss, dataset).

    Attributes:
        weights: the file of the module's values; None for a module on the meta device, which is filled by its
            ``reset_parameters``, and for a plan.
    """

    def __init__(self, module: nn.Module, loss: Any, dataset: Any, folder: Path | None) -> None:
        """Write the values of ``module`` into ``folder``. Raises RecipeError if only some are on the meta device."""
        require_kept(module)
        tensors = _tensors_by_name(module)
        real = {name for name, tensor in tensors.items() if not tensor.is_meta}
        if real and len(real) < len(tensors):
            missing = min(tensors.keys() - real)
            raise RecipeError("a part of the module is on the meta device", where=f"module: {missing}")
        # The copy has no values: ranks get it by pickle, and the values from the file.
        self._module = on_meta(module)
        self._loss = loss
        self._dataset = dataset
        pickle_parametrized(self._module)
        self.weights = folder / "weights.safetensors" if real and folder is not None else None
        if self.weights is not None:
            save_file(
                {name: real_pairs(t).cpu().contiguous().clone() for name, t in tensors.items()}, self.weights
            )

    def __call__(self) -> tuple[nn.Module, Any, Any]:
        return copy.deepcopy(self._module), self._loss, self._dataset


class ObjectModel(FactoryModel):
    """The model of a ``GivenModel``: starts from the values that the module had."""

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        super().__init__(target, arguments)
        function: Any = self._function
        self.name = type(function()[0]).__name__
        self._weights: Path | None = function.weights

    def _require_initial_values(self, module: nn.Module) -> None:
        """Its own values, if it has some."""

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        if self._weights is None:
            super().fill(model, seed)
            return
        with torch.device("meta"):
            share(model, shared_names(self.build()))
        with safe_open(str(self._weights), framework="pt") as file:
            for name, tensor in _tensors_by_name(model).items():
                whole = file.get_slice(name)
                target = real_pairs(tensor)
                # A slice of safetensors cannot index a scalar.
                value = whole[local_slices(target)] if whole.get_shape() else file.get_tensor(name)
                local_part(target).copy_(value)


def _tensors_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name; a shared one once."""
    tensors: dict[str, Tensor] = dict(named_parameters(module))
    tensors.update((canonical_name(name), buffer) for name, buffer in module.named_buffers())
    return tensors


def real_pairs(tensor: Tensor) -> Tensor:
    """A tensor outside autograd; a complex one as pairs of real numbers, as files hold it."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def on_meta(module: nn.Module) -> nn.Module:
    """A copy without values; shared tensors stay shared. Raises RecipeError for one that cannot be copied."""
    # deepcopy takes from the memo what it has already copied, so it never copies a value.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # of any attribute
        results = sorted(
            f"{path}.{name}" if path else name
            for path, owner in module.named_modules()
            for name, value in vars(owner).items()
            if isinstance(value, Tensor) and not value.is_leaf
        )
        where = f"module: {type(module).__name__}"
        why = f"{type(error).__name__}: {error}"
        if results:
            where = f"module: {results[0]}"
            why = "a result of autograd is its attribute"
        raise RecipeError(
            "the module cannot be copied",
            where=where,
            why=why,
            fix="delete what a forward pass left there; for weight_norm, use torch.nn.utils.parametrizations",
        ) from error
