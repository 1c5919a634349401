"""Tensors that a module's code stores in attributes, such as an auxiliary loss that the caller reads afterwards.

Compiled code runs no Python, so such tensors are further results of it (runtime/compiled.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwise.runtime.same_code import MODULE_ATTRIBUTES
from shardwise.runtime.torch_private import tree_flatten

AttributePath = tuple[str, bool, str]
"""The path of a module within a block, whether a buffer is meant, and the name."""


@contextmanager
def storing(block: nn.Module) -> Iterator[dict[AttributePath, Tensor]]:
    """Collects the tensors that the modules of a block store in attributes and buffers, and takes them out again.

    Raises:
        ValueError: a container got one, which nothing would fill later.
    """
    before, contents = dict(_attributes_of(block)), dict(_container_tensors(block))
    stored: dict[AttributePath, Tensor] = {}
    yield stored
    for place, value in dict(_attributes_of(block)).items():
        if value is not before.get(place) and isinstance(value, Tensor):
            stored[place] = value
            put(block, place, before.get(place))
            if place not in before:
                del _holder(block, place)[place[2]]
    for (path, name), tensors in _container_tensors(block):
        if tensors - contents.get((path, name), set()):
            where = f"its module {path}" if path else "it"
            raise ValueError(f"{where} stores a tensor within {name!r}; store it as an attribute of its own")


def put(block: nn.Module, place: AttributePath, value: Tensor | None) -> None:
    _holder(block, place)[place[2]] = value


def _holder(block: nn.Module, place: AttributePath) -> dict[str, Any]:
    module = block.get_submodule(place[0])
    return module._buffers if place[1] else vars(module)


def _attributes_of(block: nn.Module) -> Iterator[tuple[AttributePath, Any]]:
    """Every attribute and buffer of the modules of a block."""
    for path, _ in block.named_modules():
        for buffers in (False, True):
            for name, value in _holder(block, (path, buffers, "")).items():
                yield (path, buffers, name), value


def _container_tensors(block: nn.Module) -> Iterable[tuple[tuple[str, str], set[int]]]:
    """The tensors within the lists and dictionaries that are attributes, as numbers."""
    for (path, buffer, name), value in _attributes_of(block):
        if not buffer and name not in MODULE_ATTRIBUTES and isinstance(value, list | tuple | dict):
            yield (path, name), {id(leaf) for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)}
