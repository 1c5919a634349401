"""Private names of ``torch.nn.utils.parametrize``; torch_private.py has all others.

All names were checked on torch 2.13.0 (``torch_private.CHECKED``).
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def pickle_parametrized(model: nn.Module) -> None:
    """Let pickle take a model's parametrized modules, such as those of weight norm.

    torch refuses them, because it makes their classes at run time. They are made again from the modules' own classes.
    """
    for module in model.modules():
        if parametrize.is_parametrized(module):
            copyreg.pickle(type(module), _as_made)


def _as_made(module: Any) -> tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any]]:
    kind = parametrize.type_before_parametrizations(module)
    return _parametrized, (kind, list(module.parametrizations)), vars(module)


def _parametrized(kind: type[nn.Module], tensors: Sequence[str]) -> nn.Module:
    """A module of this class without state, whose ``tensors`` will be computed from others."""
    module = kind.__new__(kind)
    vars(module)["_parameters"] = vars(module)["_buffers"] = vars(module)["_modules"] = {}
    parametrize._inject_new_class(module)
    for tensor in tensors:
        parametrize._inject_property(module, tensor)
    return module
