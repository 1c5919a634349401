"""A user's own model: any ``nn.Module`` and a loss, so Shardwise is not for language models alone.

``model: {factory: package.module:function, arguments: {...}}`` names a function that returns
``(module, loss)`` or ``(module, loss, dataset)``:

    module   any nn.Module. If it has a method ``units()``, the modules that returns, in forward order, are
             wrapped one by one; otherwise it is wrapped as a whole. If it has a method ``tensor_plan()``, it can be
             split over ranks: that returns ways to split (model/split.py) by names of layers, with ``*`` for one part
             of a name and, after a colon, into how many pieces at most: ``{"blocks.*.query": "column:12"}``.
    loss     called as loss(module, batch); returns (sum over the valid targets, int64 count of them), both
             scalar tensors, without waiting for the device.
             Where batches are parts of sequences (sequence_parallel), batch["positions"] says of which tokens.
    dataset  map-style, of dicts of tensors; or a function without arguments that returns one, called outside
             the meta device. ``labels`` is one of the keys, and -100 in it is not a target. Without a dataset
             the recipe's text is read, and batches are those of a language model.

The function is called on the meta device, and more than once: what it returns must follow from its arguments.
So constructors cannot give values; those come from ``reset_parameters()``, PyTorch's own convention, which
every module with parameters or buffers of its own must have. Each is run at full size on the CPU under a seed
of its own and this rank's slice is copied, so values do not depend on the sharding and memory is one module's
at a time.

Refused: building the module for real on every rank to slice it, which is what does not fit; and a base class
to inherit from.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Batch, Blueprint, LossSum, SampleShapes, token_shapes
from shardwise.model.initial import seed_of
from shardwise.model.slices import (
    canonical_name,
    local_part,
    local_slices,
    named_parameters,
    share,
    shared_names,
)
from shardwise.model.split import Split, TensorPlan

LossFunction = Callable[[nn.Module, Batch], LossSum]


class FactoryModel(Blueprint):
    """What ``target`` ("package.module:function") returns for ``arguments``.

    The working directory is importable. Raises RecipeError when the function cannot be had or returns
    something else.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self.target = target
        self.arguments = dict(arguments)
        self.name = target.partition(":")[2] or target
        self._function = _import(target)
        with torch.device("meta"):
            _, self._loss, dataset = self._call()
        self.dataset = self._made(dataset)
        self._sample = None if dataset is None else self._first_sample()

    def build(self, depth: int | None = None) -> nn.Module:
        return self._call()[0]

    def units(self, model: nn.Module) -> list[nn.Module]:
        method = getattr(model, "units", None)
        units = list(method()) if callable(method) else []
        if not all(isinstance(unit, nn.Module) for unit in units):
            raise self._error("units() must return modules")
        return units

    def tensor_plan(self, model: nn.Module) -> TensorPlan:
        method = getattr(model, "tensor_plan", None)
        if not callable(method):
            return super().tensor_plan(model)
        try:
            return {name: Split.parsed(how) for name, how in dict(method()).items()}
        except (TypeError, ValueError) as error:
            raise self._error("tensor_plan() must return names and ways to split", why=str(error)) from error

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        if "positions" not in batch:
            return self._loss(model, batch)
        watched = _Watched(batch)
        result = self._loss(model, watched)
        if not watched.asked:
            raise self._error(
                "the loss does not read batch['positions']",
                why="with sequence_parallel a batch is a part of its sequences, and positions say which",
                fix="give them to the model, or set sequence_parallel to 1",
            )
        return result

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        if self._sample is None:
            return token_shapes(sequence_length)
        return {name: (tuple(value.shape), value.dtype) for name, value in self._sample.items()}

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        """Raises RecipeError, naming the module, where there are tensors and no ``reset_parameters``."""
        with torch.device("meta"):
            reference = self.build()
        share(model, shared_names(reference))
        held: dict[str, Tensor] = dict(named_parameters(model))
        held.update((canonical_name(name), buffer) for name, buffer in model.named_buffers())
        with torch.random.fork_rng(devices=[]):
            for path, module in self._resettable("", reference):
                torch.default_generator.manual_seed(seed_of(seed, path))
                module.to_empty(device="cpu")
                self._reset(path, module)
                for name, value in [
                    *module.named_parameters(prefix=path),
                    *module.named_buffers(prefix=path),
                ]:
                    if name in held:
                        local_part(held[name]).copy_(value[local_slices(held[name])])
                module.to("meta")

    def _resettable(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The topmost modules that can start themselves; together they have every tensor."""
        if _starter(module) is not None:
            yield path, module
            return
        self._require_no_tensors(path, module)
        for name, child in module.named_children():
            yield from self._resettable(f"{path}.{name}" if path else name, child)

    def _reset(self, path: str, module: nn.Module) -> None:
        """Children first, as their constructors ran first."""
        for name, child in module.named_children():
            self._reset(f"{path}.{name}" if path else name, child)
        starter = _starter(module)
        if starter is None:
            self._require_no_tensors(path, module)
        else:
            starter()

    def _require_no_tensors(self, path: str, module: nn.Module) -> None:
        own = [
            name
            for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        ]
        if own:
            raise self._error(
                f"module {path or type(module).__name__!r} does not say how {own[0]} starts",
                fix=f"give {type(module).__name__} a reset_parameters() that fills it",
            )

    def _call(self) -> tuple[nn.Module, LossFunction, Any]:
        try:
            made = self._function(**self.arguments)
        except Exception as error:  # the user's code
            raise self._error(f"{self.name}() failed", why=f"{type(error).__name__}: {error}") from error
        if not isinstance(made, tuple) or len(made) not in (2, 3):
            raise self._error(f"{self.name}() must return (module, loss) or (module, loss, dataset)")
        module, loss, dataset = (*made, None)[:3]
        if not isinstance(module, nn.Module) or not callable(loss):
            kinds = f"it returned ({type(module).__name__}, {type(loss).__name__})"
            raise self._error(f"{self.name}() must return an nn.Module and a function", why=kinds)
        return module, loss, dataset

    def _made(self, dataset: Any) -> Any:
        """The dataset itself, where a function (or a class) that makes it was given."""
        if not callable(dataset) or (hasattr(dataset, "__getitem__") and not isinstance(dataset, type)):
            return dataset
        try:
            with torch.device("cpu"):
                return dataset()
        except Exception as error:  # the user's code
            why = f"{type(error).__name__}: {error}"
            raise self._error("the dataset cannot be made", why=why) from error

    def _first_sample(self) -> dict[str, Tensor]:
        try:
            length, sample = len(self.dataset), self.dataset[0]  # type: ignore[arg-type,index]
        except Exception as error:  # the user's code
            raise self._error("the dataset cannot be read", why=f"{type(error).__name__}: {error}") from error
        if length < 1 or not isinstance(sample, dict) or not isinstance(sample.get("labels"), Tensor):
            raise self._error("the dataset's samples must be dicts of tensors, labels among them")
        for name, value in sample.items():
            if not isinstance(value, Tensor) or value.is_meta:
                found = "is on the meta device" if isinstance(value, Tensor) else "is not a tensor"
                raise self._error(
                    f"{name!r} of the dataset {found}",
                    fix=f"let {self.name}() return a function that makes the dataset",
                )
        return sample

    def _error(self, what: str, why: str = "", fix: str = "") -> RecipeError:
        return RecipeError(what, where=f"model.factory: {self.target}", why=why, fix=fix)


class _Watched(dict[str, Tensor]):
    """A batch that knows whether its positions have been asked for."""

    asked = False

    def __getitem__(self, key: str) -> Tensor:
        self.asked |= key == "positions"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked |= key == "positions"
        return super().get(key, default)


def _starter(module: nn.Module) -> Callable[[], object] | None:
    """How a module starts its tensors. The underscored name is that of PyTorch's own attention."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _import(target: str) -> Callable[..., Any]:
    where = f"model.factory: {target}"
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise RecipeError("a factory is written package.module:function", where=where)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # not found, or whatever the module does when imported
        raise RecipeError(
            "the factory cannot be imported",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="it must be importable from the working directory",
        ) from error
    if not callable(function):
        raise RecipeError(
            "the factory is not a function", where=where, why=f"it is a {type(function).__name__}"
        )
    return function
