"""Storages of tensors, and views of them outside autograd."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.torch_private import (
    FakeTensor,
    is_traceable_wrapper_subclass,
    sharing_version_counter,
    storage_key,
    tree_iter,
)

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor)

Storages = dict[int, weakref.ref[torch.UntypedStorage]]
"""Storages of a block's arguments by key. Weak references, since a key can be reused by a new storage."""


def is_plain(leaf: Any) -> bool:
    """Whether this is an ordinary strided tensor, described by its place in its storage alone."""
    return (
        type(leaf) in _PLAIN_TENSORS
        and leaf.layout == torch.strided
        and not leaf.is_conj()
        and not leaf.is_neg()
    )


def outside_autograd(tensor: Tensor) -> Tensor:
    """The same memory as a tensor outside autograd, sharing this tensor's version counter.

    Inside a dispatch mode a plain ``detach`` has its own version counter, which later writes do not raise.
    """
    with sharing_version_counter():
        return tensor.detach()


def bytes_of_storage(tensor: Tensor) -> Tensor:
    """The tensor's whole storage as bytes."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((elements,), (1,), 0).view(torch.uint8)


def storages_in(tree: Any) -> Storages:
    """Storages of the plain tensors in a block's arguments."""
    tensors = (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))
    storages = [t.untyped_storage() for t in tensors if not is_wrapper_subclass(t)]
    return {storage_key(storage): weakref.ref(storage) for storage in storages}


def is_wrapper_subclass(tensor: Any) -> bool:
    """Whether this is a wrapper subclass, such as DTensor."""
    return is_traceable_wrapper_subclass(tensor)


def storage_keys(tensors: Iterable[Any]) -> Iterator[int]:
    """Keys of the current storages of some weights."""
    for tensor in tensors:
        if is_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            # Since torch 2.13 a DTensor also lists its mesh here.
            parts = [getattr(tensor, name) for name in names]
            yield from storage_keys(part for part in parts if isinstance(part, Tensor))
        else:
            yield storage_key(tensor.untyped_storage())
