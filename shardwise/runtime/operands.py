"""Tensors among the arguments and results of one operation."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in ``values``, in order, also those in lists, tuples and dicts.

    An operation takes and returns no other containers, so this needs no registry of them, as ``tree_iter`` does.
    """
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(*value)
        elif isinstance(value, dict):
            tensors += tensors_in(*value.values())
    return tensors
