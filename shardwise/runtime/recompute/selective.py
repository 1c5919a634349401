"""Selective activation checkpointing: keep the results of matrix products and attention, recompute the rest.

(Korthikanti et al. 2022, arXiv:2205.05198, section 5, who keep everything but attention.) Norms, activation functions,
rotary positions, residual sums and casts run again: they are bound by memory traffic and add almost no FLOPs. Two
dispatch modes do this: ``Keeping`` around the first run of a block, ``Returning`` around the second. The budget
(budget.py) uses the same modes with another policy.

Two kinds of products are not kept. Attention with dropout runs again, because a skipped kernel would not advance the
random generator, and every later dropout mask would change. So does a batched product that is larger than both
factors: the scores of unfused attention, the largest tensors of a block. A kept result that was overwritten in place
is dropped, and its operation runs again. But if the operation that overwrites it is the first to use it, as where LoRA
adds to the base layer's product, what it leaves is kept, and neither runs again.

Why not ``torch.utils.checkpoint.create_selective_checkpoint_contexts``: it raises an error at the first kept result
that was overwritten in place, as PyTorch's own unfused attention does with its mask. Writes are detected by storage
while the block runs, and afterwards by the version counters of all aliases: ``_unsafe_view`` of a product has
a counter of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.offload.activations import SavedTensor, save_offloaded
from shardwise.runtime.operands import tensors_in
from shardwise.runtime.storages import is_plain, outside_autograd
from shardwise.runtime.torch_private import (
    TorchDispatchMode,
    schema_of,
    storage_key,
    tree_map_only,
)

BATCHED = frozenset({"aten::bmm", "aten::baddbmm"})
MATRIX_PRODUCTS = BATCHED | {
    "aten::mm",
    "aten::addmm",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "shardwise::float8_product",
}
ATTENTION_PREFIXES = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "shardwise::ring_attention",
    "shardwise::local_attention",
)
"""Name prefixes of the attention kernels of all devices."""

SENDS = ("c10d::", "_c10d_functional::", "fsdp::", "shardwise::ring_")
"""Name prefixes of collectives."""


OperationCall = tuple[Any, int]
"""An operation, and the number of its earlier calls in the block."""


def is_kept(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether ``selective`` keeps the result of one call."""
    if not _is_costly(operation):
        return False
    if is_attention(operation):
        return not argument_of("dropout_p", operation, args, kwargs, 0.0)
    if _operation_name(operation) not in BATCHED:
        return True
    return bool(result.numel() <= sum(tensor.numel() for tensor in tensors_in(args)))


@cache
def _is_costly(operation: Any) -> bool:
    """Whether an operation is a product or attention that returns its result."""
    named = is_attention(operation) or _operation_name(operation) in MATRIX_PRODUCTS
    return named and not schema_of(operation).is_mutable


def selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of the first and second run of a block: ``checkpoint(..., context_fn=selective_contexts)``."""
    results = Results()
    return Keeping(results, lambda call, *rest: is_kept(call[0], *rest)), Returning(results)


class _WrittenTo(Exception):
    """A kept result was written to in place."""


@dataclass
class _Result:
    """One tensor of a kept result, and aliases of its memory that have their own version counters.

    Attributes:
        tensors: the same, the result first, as long as the block runs.
    """

    kept: SavedTensor
    tensors: list[Tensor]
    others: list[SavedTensor] = field(default_factory=list)

    def save_again(self) -> None:
        self.kept, *self.others = map(save_offloaded, self.tensors)

    def take(self) -> Tensor:
        tensor = self.kept.value()
        if tensor is None or any(other.value() is None for other in self.others):
            raise _WrittenTo
        return outside_autograd(tensor)


class Results:
    """SavedTensor results of one run of a block, by call."""

    def __init__(self) -> None:
        self.generators: dict[torch.Generator, Tensor] = {}
        """Generators that the block itself draws from, with their states before the first draw."""
        self._results: dict[OperationCall, Any] = {}
        self._by_storage: dict[int, tuple[OperationCall, _Result]] = {}  # while the block runs
        self._unread: set[int] = set()  # of these storages, those that no operation has read
        self._updates: dict[
            OperationCall, OperationCall
        ] = {}  # in-place operations with what made their results
        self._updated: list[_Result] = []  # by the operation that runs
        self._taken: set[OperationCall] = set()

    def put(self, call: OperationCall, result: Any, *, unread: bool = False) -> None:
        """Keep a result; ``unread``: of the operation that runs."""

        def kept(tensor: Tensor) -> _Result:
            tensor = outside_autograd(tensor)
            kept_result = _Result(save_offloaded(tensor), [tensor])
            if is_plain(tensor):
                key = storage_key(tensor.untyped_storage())
                self._by_storage[key] = call, kept_result
                if unread:
                    self._unread.add(key)
            return kept_result

        self._results[call] = tree_map_only(Tensor, kept, result)

    def meet(self, tensors: Iterable[Any]) -> None:
        """Note results that alias the memory of a kept result without being views of it."""
        if not self._by_storage:
            return
        for tensor in filter(is_plain, tensors):
            _, result = self._by_storage.get(storage_key(tensor.untyped_storage()), (None, None))
            if result is not None:
                result.tensors.append(outside_autograd(tensor))
                result.others.append(save_offloaded(result.tensors[-1]))

    def before_write(self, writer: OperationCall, tensors: Iterable[Any]) -> None:
        """Drop results that an operation is about to overwrite; copy those of operations that run only once.

        Results that nothing has read yet stay, with what the operation writes.
        """
        for tensor in filter(is_plain, tensors):
            key = storage_key(tensor.untyped_storage())
            if key in self._unread and _updates_first_argument(writer[0]):
                self._updates[writer], result = self._by_storage[key]
                self._updated.append(result)
                continue
            self._unread.discard(key)
            call, overwritten = self._by_storage.pop(key, (None, None))
            if call is None or overwritten is None:
                continue
            if runs_once(call[0]) and (now := overwritten.kept.value()) is not None:
                overwritten.kept = save_offloaded(now.clone())
                overwritten.others = []
                overwritten.tensors.clear()
            else:
                self._results.pop(call, None)

    def save_updated(self) -> None:
        """Save what the last operation wrote. Autograd raises version counters when an operation has ended."""
        for result in self._updated:
            result.save_again()
        self._updated.clear()

    def note_reads(self, tensors: Iterable[Any], result: Any) -> None:
        """Note the operands of an operation. One that returns the memory of an operand does not read that one."""
        if self._unread:
            self._unread -= _storage_keys(tensors) - _storage_keys(tensors_in(result))

    def calls(self) -> Collection[OperationCall]:
        """The calls whose results are kept."""
        return self._results.keys()

    def only(self, calls: Collection[OperationCall]) -> None:
        """Drop all other results."""
        self._results = {call: result for call, result in self._results.items() if call in calls}

    def ended(self) -> None:
        """The block has run: its storages may be freed and their keys reused."""
        self.save_updated()
        for _, result in self._by_storage.values():
            result.tensors.clear()
        self._by_storage.clear()
        self._unread.clear()

    def take(self, call: OperationCall) -> Any:
        """Remove and return a result; None when it was not kept or was written to since."""
        kept = self._results.pop(call, None)
        if kept is None:
            return None
        with suppress(_WrittenTo):
            result = tree_map_only(_Result, _Result.take, kept)
            self._taken.add(call)
            return result
        return None

    def is_updated_by(self, call: OperationCall) -> bool:
        """Whether a result that was taken has already what this call would write."""
        return self._updates.get(call) in self._taken

    def clear(self) -> None:
        self._results.clear()
        self._taken.clear()


Policy = Callable[[OperationCall, tuple[Any, ...], Mapping[str, Any], Any], bool]
"""Whether to keep the result of a call with these arguments."""


class Keeping(TorchDispatchMode):
    """The first run of a block: keeps the results that the policy selects."""

    def __init__(self, results: Results, policy: Policy) -> None:
        super().__init__()
        self._kept = results
        self._policy = policy
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = func, self._calls[func]
        self._calls[func] += 1
        self._kept.save_updated()
        self._kept.before_write(call, written_by(func, args, kwargs))
        if (generator := kwargs.get("generator")) is not None:
            self._kept.generators.setdefault(generator, generator.get_state())
        result = func(*args, **kwargs)
        if not func.is_view and func.namespace != "prim":
            self._kept.note_reads(tensors_in(args, kwargs), result)
        if self._policy(call, args, kwargs, result):
            self._kept.put(call, result, unread=True)
        elif not func.is_view:
            self._kept.meet(tensors_in(result))
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._kept.ended()


class Returning(TorchDispatchMode):
    """The second run of a block: returns each kept result once. A third run, of a retained graph, computes them.

    Args:
        buffers: storages of the block's buffers, such as running statistics. They are not updated again.
    """

    def __init__(self, results: Results, buffers: Collection[int] = ()) -> None:
        super().__init__()
        self._kept = results
        self._buffers = buffers
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        self._swap_generators()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._swap_generators()
        self._kept.clear()  # results of operations that did not run again

    def _swap_generators(self) -> None:
        # The second run draws what the first one drew; then generators go on where they were.
        for generator, state in self._kept.generators.items():
            self._kept.generators[generator] = generator.get_state()
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = func, self._calls[func]
        self._calls[func] += 1
        if (result := self._kept.take(call)) is not None:
            return result
        if self._kept.is_updated_by(call):
            return args[0]
        if self._buffers and _operation_name(func).endswith("_"):
            for tensor in filter(is_plain, written_by(func, args, kwargs)):
                if storage_key(tensor.untyped_storage()) in self._buffers:
                    return tensor
        return func(*args, **kwargs)


def runs_once(operation: Any) -> bool:
    """Whether an operation must not run a second time: a functional collective, or a batch norm.

    A collective that writes into its argument runs again, because it returns nothing that could replace it.
    """
    name = _operation_name(operation)
    sends = (
        name.startswith(SENDS) and not schema_of(operation).is_mutable and not name.endswith("wait_tensor")
    )
    return sends or "batch_norm" in name


def is_attention(operation: Any) -> bool:
    """Whether an operation is an attention kernel."""
    return _operation_name(operation).startswith(ATTENTION_PREFIXES)


@cache
def _operation_name(operation: Any) -> str:
    """Namespace and name of an operation, without its overload."""
    return str(operation.name()).partition(".")[0]


def argument_of(
    name: str, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], default: Any
) -> Any:
    """The value of an argument of one call, by name."""
    names = [argument.name for argument in schema_of(operation).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}.get(name, default)


def written_by(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes in place."""
    written = _written_arguments(operation)
    if not written:
        return []
    return tensors_in(*(args[at] if at < len(args) else kwargs.get(name) for at, name in written))


@cache
def _updates_first_argument(operation: Any) -> bool:
    """Whether all that an operation does is to write to its first argument, which it returns with the same shape.

    Its second run may then be left out, unless it draws random numbers: every later one would change.
    """
    returns = schema_of(operation).returns
    written = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    first_alone = [position for position, _ in _written_arguments(operation)] == [0]
    others = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
    return written and first_alone and others.isdisjoint(operation.tags)


def _storage_keys(tensors: Iterable[Any]) -> set[int]:
    return {storage_key(tensor.untyped_storage()) for tensor in tensors if is_plain(tensor)}


@cache
def _written_arguments(operation: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation writes in place."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(operation).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
