"""Which modules run the same code: with equal weights and arguments they compute the same.

Blocks of one model differ in their weights and names. Findings about one of them (a compilation, the results to keep
for the backward pass) hold for all others that run the same code.

Blocks may also differ in whole numbers, most often in their own number (``layer_idx`` in transformers), which few of
them read. ``numbers_read`` notes which numbers a forward pass reads. Another block with the same code, and with the
same values of these, takes the same path through it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Number = tuple[str, str]
"""The path of a module within a block, and the name of its attribute."""

_PLAIN_VALUES = (bool, int, float, str, bytes, type, type(None), torch.dtype, torch.device, torch.Size)


def code_of(value: Any) -> Any:
    """Equal for modules that compute the same from the same weights, arguments and numbers.

    Methods of a dataclass, such as hooks, are the same if its compared fields are, and process groups if their names
    are: one process makes many worlds in dry runs. Objects of unknown kinds are the same only if they are one object.
    """
    if isinstance(value, nn.Module):
        return code_of_module(value, vars(value), _HOOKS)
    if isinstance(value, _PLAIN_VALUES):
        return type(value), value
    if isinstance(value, dict):
        return tuple((code_of(key), code_of(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(map(code_of, value))
    if isinstance(value, dist.ProcessGroup):
        return type(value), value.group_name, value.rank(), value.size()  # collectives look it up by its name
    if isinstance(value, partial):
        return partial, code_of(value.func), code_of(value.args), code_of(value.keywords)
    if isinstance(value, MethodType) and dataclasses.is_dataclass(value.__self__):
        return value.__func__, code_of(value.__self__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = (field.name for field in dataclasses.fields(value) if field.compare)
        return type(value), tuple(code_of(getattr(value, name)) for name in compared)
    return Same(value)


def code_of_module(module: nn.Module, named: Collection[str], hooks: Sequence[str] = ()) -> Any:
    """The same of a module's attributes ``named`` and its ``hooks`` alone, so that others do not count."""
    attributes = {
        name: value
        for name, value in vars(module).items()
        # Numbers are compared apart (``numbers_read``): most modules store some that they never read.
        if name in named and name not in MODULE_ATTRIBUTES and not _is_number(module, value)
    }
    tensor_names = (*module._parameters, *module._buffers)  # their values may differ
    children = dict(module.named_children())
    called = [hook for name in hooks for hook in vars(module)[name].values()]
    return type(module), tensor_names, code_of(attributes), code_of(children), code_of(called)


def numbers_of(block: nn.Module, named: Collection[str]) -> dict[Number, int]:
    """The whole numbers that are attributes of modules in a block; of the block itself those ``named``."""
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if _is_number(module, value) and (path or name in named)
    }


@contextmanager
def numbers_read(block: nn.Module, numbers: Mapping[Number, int]) -> Iterator[set[Number]]:
    """The set of those of a block's ``numbers`` that are read within this context."""
    read: set[Number] = set()
    with ExitStack() as stack:
        for path in dict.fromkeys(path for path, _ in numbers):
            names = {name: (path, name) for own, name in numbers if own == path}
            stack.enter_context(_watched(block.get_submodule(path), names, read))
        yield read


@contextmanager
def _watched(module: nn.Module, names: Mapping[str, Number], read: set[Number]) -> Iterator[None]:
    """In this context the module is of a subclass that notes which of its attributes ``names`` are read.

    Python looks ``__getattribute__`` up on the class alone, so an instance cannot have its own. An integer that notes
    its use would not do: arithmetic and calls of kernels pass it on as a plain one.
    """
    original = type(module)

    def noting(self: nn.Module, name: str) -> Any:
        if name in names:
            read.add(names[name])
        return original.__getattribute__(self, name)

    # The same name, and isinstance holds: the model's code sees its own class.
    module.__class__ = type(original.__name__, (original,), {"__getattribute__": noting})
    try:
        yield
    finally:
        module.__class__ = original


def _is_number(module: nn.Module, value: Any) -> bool:
    """Whether an attribute is one of ``numbers_of``. Those of torch's own layers are sizes and belong to the code."""
    return type(value) is int and any(
        not kind.__module__.startswith("torch.") for kind in type(module).__mro__ if kind is not object
    )


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, without the one that changes what it computes."""


class Same:
    """Equal only to another of one object, which it does not keep alive."""

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        try:
            self._value: Any = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value() is not None and self._value() is other._value()
