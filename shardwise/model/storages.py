"""What memory tensors lie in: their storages, and tensors over them that autograd knows nothing of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)

Storages = dict[int, weakref.ref[torch.UntypedStorage]]
"""Storages that a block is called with, by key. Weak: a key alone may be another storage's by now."""


def is_plain(leaf: Any) -> bool:
    """Whether this is a tensor of which the place in its storage says everything."""
    return type(leaf) in _PLAIN and leaf.layout == torch.strided and not leaf.is_conj() and not leaf.is_neg()


def outside_autograd(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that autograd knows nothing of, with the version counter of this one.

    A plain ``detach`` below autograd, in a dispatch mode, has a counter of its own, which no later write raises.
    """
    guard: Any = torch._C._SetExcludeDispatchKeyGuard
    with guard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def copy_of_storage(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor's storage."""
    return _elements(outside_autograd(tensor)).clone()


def bytes_of_storage(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return _elements(tensor).view(torch.uint8)


def _elements(tensor: Tensor) -> Tensor:
    """A storage as one vector of its tensor's dtype."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def storages_in(tree: Any) -> Storages:
    """Storages of the plain tensors in a block's arguments."""
    tensors = (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))
    storages = [t.untyped_storage() for t in tensors if not is_made_of_others(t)]
    return {storage._cdata: weakref.ref(storage) for storage in storages}


def is_made_of_others(tensor: Any) -> bool:
    return is_traceable_wrapper_subclass(tensor)


def storage_keys(tensors: Iterable[Any]) -> Iterator[int]:
    """Which storages some weights lie in, as they are at the moment."""
    for tensor in tensors:
        if is_made_of_others(tensor):
            names, _ = tensor.__tensor_flatten__()
            # Of a DTensor the mesh is one of them as well, from torch 2.13 on.
            parts = [getattr(tensor, name) for name in names]
            yield from storage_keys(part for part in parts if isinstance(part, Tensor))
        else:
            yield tensor.untyped_storage()._cdata
