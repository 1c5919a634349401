"""Which modules run the same code: with equal weights and arguments they compute the same.

Blocks of one model differ in their weights and names. Findings about one of them (a compilation, the results
to keep for the backward pass) hold for all others that run the same code.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, bytes, type, type(None), torch.dtype, torch.device, torch.Size)


def code_of(value: Any) -> Any:
    """Equal for modules that compute the same from the same weights and arguments.

    Methods of a dataclass, such as hooks, are the same if its compared fields are. Objects of unknown kinds are the
    same only if they are one object.
    """
    if isinstance(value, nn.Module):
        return code_of_module(value, vars(value), _HOOKS)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        return tuple((code_of(key), code_of(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(map(code_of, value))
    if isinstance(value, MethodType) and dataclasses.is_dataclass(value.__self__):
        return value.__func__, code_of(value.__self__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = (each.name for each in dataclasses.fields(value) if each.compare)
        return type(value), tuple(code_of(getattr(value, name)) for name in compared)
    return Same(value)


def code_of_module(module: nn.Module, named: Collection[str], hooks: Sequence[str] = ()) -> Any:
    """The same of a module's attributes ``named`` and its ``hooks`` alone, so that others do not count."""
    own = {name: value for name, value in vars(module).items() if name in named and name not in _OF_MODULES}
    called = [hook for name in hooks for hook in vars(module)[name].values()]
    held = (*module._parameters, *module._buffers)
    return type(module), held, code_of(own), code_of(dict(module.named_children())), code_of(called)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


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
