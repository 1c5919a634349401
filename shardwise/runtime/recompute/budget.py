"""Activation checkpointing under a budget: a block keeps the share of its activations that spares most recomputation.

The choice is made at the first call with given shapes of all blocks that run the same code. That call keeps every
candidate: results of products and attention, and single results that autograd saves. It counts the cost and size of
each. When the block ends, it drops the results that the knapsack (knapsack.py) does not choose. Later calls, of other
blocks too, keep the chosen results only. The choice uses shapes and dtypes, never the device, so the dry run, the
training run and all ranks choose alike.

In the backward pass the block runs again as a segment of one block (segments.py), and kept results are returned in
place of their operations (selective.py). All other operations run, up to the last tensor that the backward pass needs.
Random operations run again with the same state of their generator, so their results are no candidates.
Collectives and batch norms run only once, so their results are always kept.

A recorder that replays single operations on demand took 0 to 5 % less peak memory at equal FLOPs, for 500 more lines
(docs/concepts/activation-memory.md). A compiled block recomputes within its compiled code: the partitioner gets the
budget instead (torch_private_partitioner.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.compiled import limit_saved
from shardwise.runtime.flops import flops_of, tensor_bytes
from shardwise.runtime.recompute.calls import Saving
from shardwise.runtime.recompute.knapsack import Item, best
from shardwise.runtime.recompute.segments import Segment
from shardwise.runtime.recompute.selective import (
    Keeping,
    OperationCall,
    Results,
    Returning,
    argument_of,
    is_attention,
    runs_once,
    written_by,
)
from shardwise.runtime.same_code import code_of_module, numbers_of
from shardwise.runtime.storages import is_plain, storage_keys
from shardwise.runtime.torch_private import schema_of, storage_key, tree_iter

_UNFILLED = ("aten::empty", "aten::new_empty")
"""Beginnings of the names of operations that return memory for others to fill."""


def within_budget(blocks: Sequence[nn.Module], share: float) -> list[nn.Module]:
    """Wrap blocks that are not compiled. Each keeps at most ``share`` of its activations; 0 <= share <= 1."""
    if share == 1:
        return list(blocks)
    chosen: dict[Any, frozenset[OperationCall]] = {}
    return [
        block if limit_saved(block, share) else Segment([block], Budget(block, share, chosen)).members[0]
        for block in blocks
    ]


class Budget:
    """Decides what each call of one block keeps.

    Args:
        chosen: by the code of a block and the shapes of a call, whose results to keep. Blocks may share it.
    """

    def __init__(self, block: nn.Module, share: float, chosen: dict[Any, frozenset[OperationCall]]) -> None:
        self.share = share
        self.chosen = chosen
        self._own = frozenset(vars(block))  # FSDP2 will add its state
        self._code: Any = None

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Saving:
        if self._code is None:
            self._code = code_of_module(block, self._own), tuple(numbers_of(block, self._own).items())
        given = [_argument_kind(leaf) for leaf in tree_iter((args, kwargs))]
        shapes = (self._code, block.training, *given, *map(_argument_kind, block.parameters()))
        if shapes in self.chosen:
            return _Chosen(block, self.chosen[shapes])
        return _Measured(block, self, shapes)


def _argument_kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)


class _Chosen(Saving):
    """A call that keeps chosen results."""

    def __init__(self, block: nn.Module, chosen: frozenset[OperationCall]) -> None:
        self.results = Results()
        self._buffers = set(storage_keys(block.buffers()))
        self._chosen = chosen

    def first(self) -> Keeping:
        return Keeping(self.results, lambda call, *_: call in self._chosen or _is_kept_always(call))

    def second(self) -> Returning:
        return Returning(self.results, self._buffers)


@dataclass
class _Noted:
    """One operation of a measured call: its cost, the bytes that it allocates, and its result's place in memory."""

    cost: tuple[int, int]
    size: int
    candidate: bool
    single: tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None = None


class _Measured(_Chosen):
    """The first call of a block: keeps every candidate, and chooses when the block has ended."""

    def __init__(self, block: nn.Module, budget: Budget, shapes: Any) -> None:
        super().__init__(block, frozenset())
        self._budget, self._shapes = budget, shapes
        self._noted: dict[OperationCall, _Noted] = {}
        self._written: dict[int, tuple[weakref.ref[torch.UntypedStorage], OperationCall]] = {}
        self._saved: dict[tuple[OperationCall, int], int] = {}  # bytes of storages that autograd saves
        self._last = 0  # operations before autograd saves the last tensor: the others do not run again

    def first(self) -> Keeping:
        return Keeping(self.results, self._note)

    def _note(
        self, call: OperationCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> bool:
        """Note an operation; whether its result is kept at once."""
        operation, _ = call
        given = {storage_key(leaf.untyped_storage()) for leaf in tree_iter((args, kwargs)) if is_plain(leaf)}
        tensors = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        new = [t for t in tensors if is_plain(t) and storage_key(t.untyped_storage()) not in given]
        for tensor in written_by(operation, args, dict(kwargs)):
            self._forget(tensor)
        if operation.is_view or operation.namespace == "prim" or not tensors:
            return False
        leaves = {id(leaf): leaf for leaf in (*tree_iter((args, kwargs)), *tensors)}
        cost = flops_of(operation, args, kwargs, result), tensor_bytes(leaves.values())
        size = sum({storage_key(t.untyped_storage()): t.untyped_storage().nbytes() for t in new}.values())
        fixed = schema_of(operation).is_mutable or _draws(operation, args, kwargs)
        candidate = len(new) == len(tensors) and not fixed and not operation.name().startswith(_UNFILLED)
        noted = self._noted[call] = _Noted(cost, size, candidate)
        if candidate and len(new) == 1:
            noted.single = new[0].dtype, new[0].shape, new[0].stride(), int(new[0].storage_offset())
        for tensor in new:
            storage = tensor.untyped_storage()
            self._written[storage_key(storage)] = weakref.ref(storage), call
        if not new:
            for tensor in tensors:
                self._forget(tensor)  # one more tensor over this memory, with a version counter of its own
        return (candidate and cost[0] > 0) or _is_kept_always(call)

    def _writer(self, tensor: Any) -> OperationCall | None:
        """Which call has written a tensor's memory."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        reference, call = self._written.get(storage_key(storage), (None, None))
        return call if reference is not None and reference() is storage else None

    def _forget(self, tensor: Tensor) -> None:
        """Its memory is not what one call has returned: only its size counts."""
        if (call := self._writer(tensor)) is not None:
            self._noted[call].single = None

    def saved(self, tensor: Tensor) -> None:
        self._last = len(self._noted)
        if (call := self._writer(tensor)) is None:
            return
        storage = tensor.untyped_storage()
        noted = self._noted[call]
        self._saved[call, storage_key(storage)] = storage.nbytes()
        if noted.single is not None and noted.single[0] == tensor.dtype and call not in self.results.calls():
            with torch.no_grad():
                self.results.put(call, tensor.detach().as_strided(*noted.single[1:]))

    def ended(self, result: Any) -> None:
        """Choose. The block's result is held by the caller in any case, so the budget does not count it."""
        for tensor in tree_iter(result):
            if (call := self._writer(tensor)) is not None:
                self._saved.pop((call, storage_key(tensor.untyped_storage())), None)
        room = sum(self._saved.values())
        always = {call for call in self.results.calls() if _is_kept_always(call)}
        taken = sum(self._noted[call].size for call in always)
        again = list(self._noted)[: self._last]
        calls = [call for call in again if call in self.results.calls() and call not in always]
        items = tuple(Item(self._noted[call].size, self._noted[call].cost) for call in calls)
        choice = best(items, max(0, int(self._budget.share * room) - taken))
        chosen = frozenset(calls[number] for number in choice.kept)
        self.results.only(chosen | always)
        self._budget.chosen[self._shapes] = chosen


def _is_kept_always(call: OperationCall) -> bool:
    return runs_once(call[0])


def _draws(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    return not is_attention(operation) or bool(argument_of("dropout_p", operation, args, kwargs, 0.0))
