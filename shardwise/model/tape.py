"""A tape: the operations of a block's run, from which results that were not kept are computed again one by one.

While a block runs, every operation is noted with what it has read, and every tensor that autograd would save in the
block is exchanged for a handle. Opened in the backward pass, a handle runs what its tensor follows from, and nothing
else, from kept results and the block's inputs (model/value.py). Python does not run the block again: no hook fires,
nothing that nobody reads is computed, and of a block whose middle was kept the second half is there and gone before
the first half is computed. An operation that changes what lies outside the block (the statistics of a batch norm), or
that sends, is not run again: its results are kept. So is memory that something fills which is no operation, a kernel
of Triton or numpy. What such a thing writes into any other tensor cannot be seen: blocks that do that need another
policy.

Refused: running the block a second time under modes that skip what was kept, as model/selective.py does, where all
that is not kept runs, needed or not. The price is the host's time for noting each operation in the forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter

from shardwise.model.flops import bytes_of, flops_of
from shardwise.model.kept import Kept, keep, unpack
from shardwise.model.knapsack import Graph, Operation
from shardwise.model.knapsack import Value as Weight
from shardwise.model.selective import argument_of, is_attention, written_by
from shardwise.model.storages import copy_of_storage, is_plain, outside_autograd
from shardwise.model.value import Given, Read, Recipe, States, Value, View

_UNFILLED = ("aten::empty", "aten::new_empty")
"""Beginnings of the names of operations that leave what they return to whoever fills it."""

_SENT = ("c10d::", "_c10d_functional::", "fsdp::", "shardwise::ring_")


@dataclass(frozen=True)
class Choice:
    """What a run is to keep: of every operation its name, and which of the values that it writes."""

    results: tuple[tuple[str, frozenset[int]], ...]


@dataclass
class _Step:
    """One operation of a run: its name, and what the choice needs to know of it."""

    name: str
    reads: list[Value]
    writes: dict[
        int, Value
    ]  # by number of the result; of an argument that is written in place, -1 less its number
    once: bool
    cost: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class _Handle:
    """Stands for a tensor that autograd has saved."""

    value: Value
    view: View


class Tape(TorchDispatchMode):
    """Notes one run of a block. ``kept`` is what to keep; without it, all that autograd saves, and costs are noted.

    Attributes:
        surprised: whether the run was not the one that ``kept`` is for. From there on nothing more is kept.
    """

    def __init__(self, kept: Choice | None) -> None:
        super().__init__()
        self.surprised = False
        self._kept = kept
        self._expected = iter(kept.results if kept is not None else ())
        self._steps: list[_Step] = []
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}

    # -- autograd saves -----------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Kept | _Handle:
        value = self._value_of(tensor)
        if value is None:
            return keep(tensor)
        self._seen(value, tensor)
        value.uses += 1
        value.saved = True
        if self._kept is None and value.tensor is None:
            value.put(tensor)
        return _Handle(value, View.of(tensor))

    @staticmethod
    def unpack(packed: Kept | _Handle) -> Tensor:
        return packed.view.on(packed.value.get()) if isinstance(packed, _Handle) else unpack(packed)

    # -- operations ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if not isinstance(func, torch._ops.OpOverload) or func.is_view or func.namespace == "prim":
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        read = [self._value_of(leaf) for leaf in leaves]
        states = States.now(leaves) if _draws(func, args, kwargs) else None
        written = {id(tensor) for tensor in written_by(func, args, kwargs)}
        self._before(leaves, read, written)
        result = func(*args, **kwargs)
        noted = [_noted(leaf, value) for leaf, value in zip(leaves, read, strict=True)]
        recipe = Recipe(len(self._steps), func, noted, spec, states)
        once = func.name().startswith(_SENT) or "batch_norm" in func.name()
        step = _Step(func.name(), [value for value in read if value], {}, once)
        results = list(tree_iter(result))
        self._overwrite(recipe, step, leaves, read, written)
        self._return(recipe, step, leaves, results)
        if not step.writes:
            return result  # a view in all but name, or a change outside
        if self._kept is None:
            moved = bytes_of({id(leaf): leaf for leaf in (*leaves, *results)}.values())
            step.cost = (flops_of(func, args, kwargs, result), moved)
        for key in self._to_keep(step):
            step.writes[key].put(outside_autograd(results[key] if key >= 0 else leaves[-1 - key]))
        self._steps.append(step)
        return result

    def _before(self, leaves: list[Any], read: list[Value | None], written: set[int]) -> None:
        """Hold what an operation is about to read or to write over, and what no recipe could give again."""
        for leaf, value in zip(leaves, read, strict=True):
            if value is None:
                continue
            if id(leaf) not in written:
                self._seen(value, leaf)
            elif self._step_of(value).once:
                value.put(copy_of_storage(leaf))

    def _seen(self, value: Value, tensor: Tensor) -> None:
        """Memory that is read before an operation has written it was filled by something else.

        Not in a dry run: nothing fills a fake tensor, and whole kernels are stood in for by what they return.
        """
        step = self._step_of(value)
        if step.name.startswith(_UNFILLED) and not step.once and not isinstance(tensor, FakeTensor):
            step.once = True
            value.put(outside_autograd(tensor))

    def _step_of(self, value: Value) -> _Step:
        """Which has written it."""
        assert value.recipe is not None, "until the block ends"
        return self._steps[value.recipe.number]

    def _overwrite(
        self, recipe: Recipe, step: _Step, leaves: list[Any], read: list[Value | None], written: set[int]
    ) -> None:
        """What is written in place is a new value of its storage."""
        for number, (leaf, before) in enumerate(zip(leaves, read, strict=True)):
            if id(leaf) not in written:
                continue
            written.remove(id(leaf))
            if before is None:
                step.once = True  # it changes what lies outside
                continue
            if not self._step_of(before).once:
                before.keepable, before.tensor = False, None
            after = step.writes[-1 - number] = Value(before.size)
            recipe.written.append((number, self._meet(leaf, after, recipe)))

    def _return(self, recipe: Recipe, step: _Step, leaves: list[Any], results: list[Any]) -> None:
        """A result is new unless its storage is that of a value, or of an argument from outside."""
        given = {leaf.untyped_storage()._cdata for leaf in leaves if is_plain(leaf)}
        for number, tensor in enumerate(results):
            if not is_plain(tensor) or tensor.untyped_storage()._cdata in given:
                continue
            if self._value_of(tensor) is None:
                value = step.writes[number] = Value(tensor.untyped_storage().nbytes())
                recipe.returned.append((number, self._meet(tensor, value, recipe)))

    def _meet(self, tensor: Tensor, value: Value, recipe: Recipe) -> weakref.ref[Value]:
        value.recipe = recipe
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = (weakref.ref(storage), value)
        return weakref.ref(value)

    def _value_of(self, leaf: Any) -> Value | None:
        if not is_plain(leaf):
            return None
        storage = leaf.untyped_storage()
        reference, value = self._values.get(storage._cdata, (None, None))
        return value if reference is not None and reference() is storage else None

    def _to_keep(self, step: _Step) -> Collection[int]:
        """Which of the values that an operation has written are kept at once."""
        keys: Collection[int] = ()
        if self._kept is not None and not self.surprised:
            name, expected = next(self._expected, ("", frozenset()))
            self.surprised = name != step.name or not expected <= step.writes.keys()
            keys = () if self.surprised else expected
        return step.writes if step.once else keys

    # -- after the run ------------------------------------------------------------------------------

    def finish(self, result: Any, choose: Callable[[Graph], Collection[int]]) -> Choice | None:
        """Hold what is kept and no more; what to keep of a run like this, where it was not known before.

        Results of the block that autograd has saved in it are held in any case, and by others too.
        """
        values = [value for step in self._steps for value in step.writes.values()]
        returned = [(t, v) for t in tree_iter(result) if (v := self._value_of(t)) is not None]
        chosen = None
        if self._kept is None:
            chosen = self._choose(values, {id(value) for _, value in returned if value.saved}, choose)
        elif next(self._expected, None) is not None:
            self.surprised = True
        for tensor, value in returned:
            # By the version counter of what the caller gets: he may write to it.
            if value.saved or value.tensor is not None:
                value.keep(outside_autograd(tensor))
        for value in values:
            # In its version of now: in-place operations count theirs up when they end.
            if value.tensor is not None:
                value.keep(value.tensor)
        self._steps, self._values = [], {}
        return chosen

    def _choose(
        self, values: list[Value], free: set[int], choose: Callable[[Graph], Collection[int]]
    ) -> Choice:
        graph = self._graph(values, free)
        held = choose(graph.of_required())  # the others are gone by now
        for number, value in enumerate(values):
            if number not in held and not graph.values[number].free:
                value.tensor = None
        kept, numbers = choose(graph), iter(range(len(values)))
        return Choice(
            tuple(
                (step.name, frozenset(key for key in step.writes if next(numbers) in kept))
                for step in self._steps
            )
        )

    def _graph(self, values: list[Value], free: set[int]) -> Graph:
        number = {id(value): index for index, value in enumerate(values)}

        def numbers(some: Iterable[Value]) -> tuple[int, ...]:
            return tuple(sorted({number[id(value)] for value in some}))

        return Graph(
            tuple(
                Operation(s.cost, numbers(s.reads), numbers(s.writes.values()), s.once) for s in self._steps
            ),
            tuple(Weight(v.size, v.saved, v.keepable, id(v) in free) for v in values),
        )


def _noted(leaf: Any, value: Value | None) -> Any:
    if value is not None:
        value.uses += 1
        return Read(value, View.of(leaf))
    if isinstance(leaf, Tensor):
        return Given(keep(leaf if leaf.is_leaf else outside_autograd(leaf)))
    return leaf


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation takes numbers from a generator."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    return not is_attention(operation) or bool(argument_of("dropout_p", operation, args, kwargs, 0.0))
