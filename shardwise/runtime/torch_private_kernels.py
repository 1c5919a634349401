"""Private names of PyTorch's dispatcher: kernels of ``aten`` operators that this package replaces.

All were checked on torch 2.13.0 (``torch_private.CHECKED``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_overriding: dict[tuple[str, str], tuple[torch.library.Library, Callable[..., Any]]] = {}
"""By the name of an operator and its dispatch key."""


def override_kernel(name: str, kernel: Callable[..., Any], key: str) -> None:
    """A kernel of an ``aten`` operator at one dispatch key, for the rest of the process."""
    if (name, key) in _overriding:
        _overriding[name, key][0]._destroy()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        library.impl(name, kernel, key)
    getattr(torch.ops.aten, name).default._uncache_dispatch(getattr(torch._C.DispatchKey, key))
    _overriding[name, key] = library, kernel


@contextmanager
def scoped_kernels(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Kernels of ``aten`` operators at one dispatch key, for one block.

    The public ``Library`` keeps them until it is collected. A compiler's trace dispatches in Python, and the operators
    cache which kernel it found: without ``_uncache_dispatch`` a later trace would take that of another block. Under a
    dispatch mode PyTorch takes the Python kernel that was registered last, also when its library is gone: so one of
    ``override_kernel`` is registered again.
    """
    dispatched = [getattr(torch.ops.aten, name).default for name in kernels]
    slot = getattr(torch._C.DispatchKey, key)

    def forget() -> None:
        for operator in dispatched:
            operator._uncache_dispatch(slot)

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)
        forget()
        try:
            yield
        finally:
            forget()
            for name in kernels:
                if (name, key) in _overriding:
                    override_kernel(name, _overriding[name, key][1], key)
