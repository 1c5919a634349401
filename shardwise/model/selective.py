"""Recompute a block, but not its matrix products and its attention: their results are kept, the rest is cheap.

(Korthikanti et al. 2022, arXiv:2205.05198, who keep all but the attention.) What is run again - norms,
activation functions, rotary positions, residual additions, casts - is bound by memory traffic and has next to no
FLOPs. Used as the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``: two dispatch modes, one for the first
run of a block, which keeps results, one for the second, which returns them in the place of running the operation.

Three results of products are not kept. Those of attention with dropout, because a kernel that is not run again
does not move the generator on, and every later mask would be another. Those that something writes to in place,
because the second run would write to them twice. And those of batched products that are larger than both factors
together: scores of attention that is not fused, the largest tensors of a block.

Refused: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, which keeps by operation as well but ends
the run at the first kept result that is written to in place, as PyTorch's own unfused attention does with its
mask. The price is this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
PRODUCTS = BATCHED | {
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "shardwise::float8_product",
}
ATTENTION = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
)
"""Beginnings of the names of attention's kernels, on all devices."""

_NOT_COUNTED = frozenset({"aten::detach", "prim::device"})
"""What the two runs call different numbers of times."""


def is_kept(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether the result of one call is kept."""
    name = _name(operation)
    if name.startswith(ATTENTION):
        return not _argument("dropout_p", operation, args, kwargs, 0.0)
    if name in BATCHED:
        return bool(result.numel() <= sum(t.numel() for t in tree_iter(args) if isinstance(t, Tensor)))
    return name in PRODUCTS


def selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of a block's first and second run: ``checkpoint(..., context_fn=selective_contexts)``."""
    kept = _Kept()
    return _Keeping(kept), _Returning(kept)


@dataclass
class _Kept:
    """Results of one run of a block, by operation and number of the call, and where each lies in memory."""

    results: dict[tuple[Any, int], Any] = field(default_factory=dict)
    storages: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def put(self, call: tuple[Any, int], result: Any) -> None:
        self.results[call] = tree_map_only(Tensor, _outside_autograd, result)
        for tensor in _tensors(self.results[call]):
            self.storages[tensor.untyped_storage()._cdata] = call

    def forget(self, tensor: Tensor) -> None:
        """Do not keep what is being written to."""
        if (call := self.storages.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self.results.pop(call, None)


class _Keeping(TorchDispatchMode):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _name(func) not in _NOT_COUNTED:
            for tensor in _written(func, args, kwargs):
                self._kept.forget(tensor)
            if is_kept(func, args, kwargs, result):
                self._kept.put((func, self._calls[func]), result)
            self._calls[func] += 1
        return result


class _Returning(TorchDispatchMode):
    """Gives each result back once: a third run, of a retained graph, computes it."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        # What lies behind the last tensor that the backward pass needs was not asked for.
        self._kept.results.clear()
        self._kept.storages.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _name(func) in _NOT_COUNTED:
            return func(*args, **kwargs)
        call = (func, self._calls[func])
        self._calls[func] += 1
        return self._kept.results.pop(call) if call in self._kept.results else func(*args, **kwargs)


def _name(operation: Any) -> str:
    """Namespace and name without overload; higher-order operators have no namespace and are never kept."""
    return str(operation.name()).partition(".")[0]


def _argument(
    name: str, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], default: Any
) -> Any:
    names = [argument.name for argument in operation._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get(name, default)


def _written(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors that a call writes to."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _outside_autograd(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that autograd knows nothing of yet, so that it can be a result once more."""
    guard: Any = torch._C._SetExcludeDispatchKeyGuard
    with guard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
