"""Recompute a block, but not its matrix products and its attention: their results are kept, the rest is cheap.

(Korthikanti et al. 2022, arXiv:2205.05198, who keep all but the attention.) What is run again - norms,
activation functions, rotary positions, residual additions, casts - is bound by memory traffic and has next to no
FLOPs. Used as the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``: two dispatch modes, one for the first
run of a block, which keeps results, one for the second, which returns them in the place of running the operation.

Two results of products are not kept. Those of attention with dropout, because a kernel that is not run again does
not move the generator on, and every later mask would be another. And those of batched products that are larger
than both factors together: scores of attention that is not fused, the largest tensors of a block. A kept result
that something has written to in place is of no use, and its operation runs again.

Refused: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, which keeps by operation as well but ends
the run at the first kept result that was written to in place, as PyTorch's own unfused attention does with its
mask. The price is this file. A write is known by the storage that it goes to while the block runs, afterwards by the
version counters of all tensors over it: what ``_unsafe_view`` makes of a product has a counter of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from shardwise.model.kept import Kept, keep
from shardwise.model.storages import is_plain, outside_autograd

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
    "shardwise::ring_attention",
)
"""Beginnings of the names of attention's kernels, on all devices."""


def is_kept(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether the result of one call is kept."""
    name = _name(operation)
    if (not is_attention(operation) and name not in PRODUCTS) or operation._schema.is_mutable:
        return False
    if is_attention(operation):
        return not argument_of("dropout_p", operation, args, kwargs, 0.0)
    factors = sum(leaf.numel() for leaf in tree_iter(args) if isinstance(leaf, Tensor))
    return name not in BATCHED or bool(result.numel() <= factors)


def selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of a block's first and second run: ``checkpoint(..., context_fn=selective_contexts)``."""
    kept = _Kept()
    return _Keeping(kept), _Returning(kept)


class _WrittenTo(Exception):
    """A kept result is not what it was."""


@dataclass(frozen=True)
class _Result:
    """One tensor of a result, kept where the block's other activations are, and other tensors over its memory."""

    kept: Kept
    others: list[Kept] = field(default_factory=list)

    def take(self) -> Tensor:
        tensor = self.kept.value()
        if tensor is None or any(other.value() is None for other in self.others):
            raise _WrittenTo
        return outside_autograd(tensor)


class _Kept:
    """Results of one run of a block, by operation and number of the call."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, int], Any] = {}
        self._by_storage: dict[int, tuple[tuple[Any, int], _Result]] = {}  # while the block runs

    def put(self, call: tuple[Any, int], result: Any) -> None:
        def kept(tensor: Tensor) -> _Result:
            found = _Result(keep(outside_autograd(tensor)))
            if is_plain(tensor):
                self._by_storage[tensor.untyped_storage()._cdata] = call, found
            return found

        self._results[call] = tree_map_only(Tensor, kept, result)

    def meet(self, tensors: Iterable[Any]) -> None:
        """Results that are no views, though they may lie in the memory of what is kept."""
        for tensor in filter(is_plain, tensors):
            _, found = self._by_storage.get(tensor.untyped_storage()._cdata, (None, None))
            if found is not None:
                found.others.append(keep(outside_autograd(tensor)))

    def forget(self, tensors: Iterable[Any]) -> None:
        """These are written to."""
        for tensor in filter(is_plain, tensors):
            call, _ = self._by_storage.pop(tensor.untyped_storage()._cdata, (None, None))
            if call is not None:
                self._results.pop(call, None)

    def ended(self) -> None:
        """The block has run. Its storages may leave the device, and others come to lie where they were."""
        self._by_storage.clear()

    def take(self, call: tuple[Any, int]) -> Any:
        """The result as it was, once; None when it was not kept or has been written to since."""
        with suppress(_WrittenTo):
            return tree_map_only(_Result, _Result.take, self._results.pop(call, None))
        return None

    def clear(self) -> None:
        self._results.clear()


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
        self._kept.forget(written_by(func, args, kwargs))
        if is_kept(func, args, kwargs, result):
            self._kept.put((func, self._calls[func]), result)
        elif not func.is_view:
            self._kept.meet(tree_iter(result))
        self._calls[func] += 1
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._kept.ended()


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
        self._kept.clear()  # what lies behind the last tensor that the backward pass needs was not asked for

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._kept.take((func, self._calls[func]))
        self._calls[func] += 1
        return func(*args, **(kwargs or {})) if result is None else result


def is_attention(operation: Any) -> bool:
    """Whether this is one of attention's kernels."""
    return _name(operation).startswith(ATTENTION)


def _name(operation: Any) -> str:
    """Namespace and name, without the overload."""
    return str(operation.name()).partition(".")[0]


def argument_of(
    name: str, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], default: Any
) -> Any:
    """The value of an argument of one call, by its name."""
    names = [argument.name for argument in operation._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get(name, default)


def written_by(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes in place."""
    found: list[Tensor] = []
    if operation._schema.is_mutable:
        for position, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                found += (leaf for leaf in tree_iter(given) if isinstance(leaf, Tensor))
    return found
