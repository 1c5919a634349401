"""A tape: the operations of a block's run, from which results that were not kept are computed again one by one.

While a block runs, every operation is noted with what it has read, and every tensor that autograd would save in the
block is exchanged for a handle. Opened in the backward pass, a handle runs what its tensor follows from, and nothing
else, from kept results and the block's inputs. Python does not run the block again: no hook fires, nothing that
nobody reads is computed, and of a block whose middle was kept the second half is there and gone before the first
half is computed.

What lives is left to reference counting. A value (one storage's content at one time) is held by handles and by the
recipes that read it; a recipe is held by the values that it writes, and lets go of what it reads once it has run. So
memory is freed as autograd frees what it saves.

An operation that draws random numbers runs again from the state that its generator had. One that writes in place
writes to a copy, unless nothing else reads what it writes over. One that changes what lies outside the block (the
statistics of a batch norm), or that sends, is not run again: its results are kept. An input, or a kept result, that
was written to since the block ran is an error, as it is in autograd.

Chosen: operations below autograd and autocast, so what runs again is the very kernel that ran. Refused: running the
block a second time under modes that skip what was kept, as model/selective.py does, where all that is not kept
runs, needed or not. The price is about 50 us for each operation in the forward pass, which an accelerator does not
notice in blocks of more than some milliseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.model.flops import bytes_of, flops_of
from shardwise.model.knapsack import Graph, Operation
from shardwise.model.knapsack import Value as Weight
from shardwise.model.selective import argument_of, is_attention, outside_autograd

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_SENT = ("c10d", "_c10d_functional", "fsdp")


@dataclass(frozen=True)
class View:
    """How a tensor lies in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def on(self, tensor: Tensor) -> Tensor:
        """This view of the storage of another tensor."""
        if View.of(tensor) == self:
            return tensor
        if tensor.dtype == self.dtype:
            return tensor.as_strided(self.size, self.stride, self.offset)
        storage = tensor.untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload, no-any-return]


class Value:
    """A storage's content at one time: the tensor where it is there, else what it is computed by."""

    __slots__ = ("__weakref__", "keepable", "recipe", "saved", "size", "tensor", "uses", "version")

    def __init__(self, size: int) -> None:
        self.size = size
        self.recipe: Recipe | None = None
        self.tensor: Tensor | None = None
        self.version = 0
        self.uses = 0  # by recipes and handles, ever
        self.saved = False  # by autograd
        self.keepable = True

    def put(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def get(self) -> Tensor:
        """The tensor, computed now if need be."""
        if self.tensor is None:
            for recipe in self._missing():
                recipe.run()
        if self.tensor is None or self.tensor._version != self.version:
            raise RuntimeError("a result of a block was written to before the backward pass has read it")
        return self.tensor

    def _missing(self) -> list[Recipe]:
        """What has to run, in the order in which it ran first."""
        found: dict[int, Recipe] = {}
        open_values = [self]
        while open_values:
            value = open_values.pop()
            recipe = value.recipe
            if value.tensor is None and recipe is not None and recipe.number not in found:
                found[recipe.number] = recipe
                open_values += [leaf.value for leaf in recipe.leaves if isinstance(leaf, _Read)]
        return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class _Read:
    """Stands for an argument that the block has computed."""

    value: Value
    view: View


@dataclass(frozen=True)
class _Given:
    """Stands for an argument from outside: an input, a weight."""

    tensor: Tensor
    version: int


class Recipe:
    """One operation: how to run it again, and the values that it writes."""

    def __init__(
        self, number: int, operation: Any, leaves: list[Any], spec: TreeSpec, states: _States | None
    ) -> None:
        self.number = number
        self.operation = operation
        self.leaves = leaves
        self.spec = spec
        self.states = states
        self.written: list[tuple[int, weakref.ref[Value]]] = []  # by number of the leaf that is written over
        self.returned: list[tuple[int, weakref.ref[Value]]] = []  # by number of the result

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a result is no new storage but that of an argument from outside."""
        key = tensor.untyped_storage()._cdata
        given = (leaf.tensor for leaf in self.leaves if isinstance(leaf, _Given) and _is_plain(leaf.tensor))
        return any(tensor.untyped_storage()._cdata == key for tensor in given)

    def run(self) -> None:
        """Fill every value that somebody waits for."""
        copies = {number: self._copy(self.leaves[number].value) for number, _ in self.written}
        leaves = [self._argument(number, leaf, copies) for number, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.no_grad(), torch._C._DisableAutocast(), _restored(self.states):
            results = list(tree_iter(self.operation(*args, **kwargs)))
        for number, reference in self.written:
            _fill(reference, copies[number])
        for number, reference in self.returned:
            _fill(reference, results[number])
        self.leaves = []

    def _argument(self, number: int, leaf: Any, copies: dict[int, Tensor]) -> Any:
        if isinstance(leaf, _Read):
            return leaf.view.on(copies[number] if number in copies else leaf.value.get())
        if isinstance(leaf, _Given):
            if leaf.tensor._version != leaf.version:
                raise RuntimeError("an input of a block was written to before the block could be run again")
            return leaf.tensor
        return leaf

    def _copy(self, value: Value) -> Tensor:
        tensor = value.get()
        return tensor if value.uses == 1 else tensor.clone()


def _fill(reference: weakref.ref[Value], tensor: Tensor) -> None:
    if (value := reference()) is not None and value.tensor is None:
        value.put(tensor)


@dataclass(frozen=True)
class _States:
    """What the generators of some devices were at."""

    cpu: Tensor
    devices: Sequence[int]
    of_devices: Sequence[Tensor]

    @classmethod
    def now(cls, leaves: Sequence[Any]) -> _States:
        return cls(torch.get_rng_state(), *get_device_states(*leaves))


@contextmanager
def _restored(states: _States | None) -> Iterator[None]:
    """The generators as they were, and afterwards as they are now."""
    if states is None:
        yield
        return
    with torch.random.fork_rng(devices=states.devices):
        torch.set_rng_state(states.cpu)
        if states.devices:
            set_device_states(states.devices, states.of_devices)
        yield


@dataclass(frozen=True)
class Kept:
    """What a run is to keep: of every operation its name, and which of the values that it writes."""

    results: tuple[tuple[str, frozenset[int]], ...]


@dataclass
class _Step:
    """One operation of a run: its name, and what the choice needs to know of it."""

    name: str
    reads: list[Value]
    writes: dict[int, Value]  # by number of the result; of an argument that is written in place, -1 less its number
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

    def __init__(self, kept: Kept | None) -> None:
        super().__init__()
        self.surprised = False
        self._kept = kept
        self._expected = iter(kept.results if kept is not None else ())
        self._steps: list[_Step] = []
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}

    # -- autograd saves -----------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        value = self._value_of(tensor)
        if value is None:
            return tensor
        value.uses += 1
        value.saved = True
        if self._kept is None and value.tensor is None:
            value.put(tensor)
        return _Handle(value, View.of(tensor))

    @staticmethod
    def unpack(packed: Tensor | _Handle) -> Tensor:
        return packed.view.on(packed.value.get()) if isinstance(packed, _Handle) else packed

    # -- operations ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if not isinstance(func, torch._ops.OpOverload) or func.is_view:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        read = [self._value_of(leaf) for leaf in leaves]
        states = _States.now(leaves) if _draws(func, args, kwargs) else None
        result = func(*args, **kwargs)
        noted = [_noted(leaf, value) for leaf, value in zip(leaves, read, strict=True)]
        recipe = Recipe(len(self._steps), func, noted, spec, states)
        once = func.namespace in _SENT or "batch_norm" in func.name()
        step = _Step(func.name(), [value for value in read if value], {}, once)
        results = list(tree_iter(result))
        self._overwrite(recipe, step, leaves, read, _written(func, args, kwargs))
        self._return(recipe, step, results)
        if self._kept is None:
            moved = bytes_of({id(leaf): leaf for leaf in (*leaves, *results)}.values())
            step.cost = (flops_of(func, args, kwargs, result), moved)
        for key in self._to_keep(step):
            step.writes[key].put(outside_autograd(results[key] if key >= 0 else leaves[-1 - key]))
        self._steps.append(step)
        return result

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
            before.keepable, before.tensor = False, None
            after = step.writes[-1 - number] = Value(before.size)
            recipe.written.append((number, self._meet(leaf, after, recipe)))

    def _return(self, recipe: Recipe, step: _Step, results: list[Any]) -> None:
        for number, tensor in enumerate(results):
            if _is_plain(tensor) and self._value_of(tensor) is None and not recipe.is_given(tensor):
                value = step.writes[number] = Value(tensor.untyped_storage().nbytes())
                recipe.returned.append((number, self._meet(tensor, value, recipe)))

    def _meet(self, tensor: Tensor, value: Value, recipe: Recipe) -> weakref.ref[Value]:
        value.recipe = recipe
        storage = tensor.untyped_storage()
        self._values[storage._cdata] = (weakref.ref(storage), value)
        return weakref.ref(value)

    def _value_of(self, leaf: Any) -> Value | None:
        if not _is_plain(leaf):
            return None
        storage = leaf.untyped_storage()
        reference, value = self._values.get(storage._cdata, (None, None))
        return value if reference is not None and reference() is storage else None

    def _to_keep(self, step: _Step) -> Collection[int]:
        """Which of the values that an operation has written are kept at once."""
        if step.once:
            return step.writes
        if self._kept is None or self.surprised:
            return ()
        name, keys = next(self._expected, ("", frozenset()))
        self.surprised = name != step.name or not keys <= step.writes.keys()
        return () if self.surprised else keys

    # -- after the run ------------------------------------------------------------------------------

    def finish(self, result: Any, choose: Callable[[Graph], Collection[int]]) -> Kept | None:
        """Hold what is kept and no more; what to keep of a run like this, where it was not known before.

        Results of the block that autograd has saved in it are held in any case, and by others too.
        """
        values = [value for step in self._steps for value in step.writes.values()]
        returned = [(t, v) for t in tree_iter(result) if (v := self._value_of(t)) is not None and v.saved]
        chosen = None
        if self._kept is None:
            chosen = self._choose(values, {id(value) for _, value in returned}, choose)
        elif next(self._expected, None) is not None:
            self.surprised = True
        for tensor, value in returned:
            value.put(outside_autograd(tensor))
        for value in values:
            if value.tensor is not None:
                value.put(value.tensor)  # at its version of now: in-place operations count theirs up when they end
                value.recipe = None
        self._steps, self._values = [], {}
        return chosen

    def _choose(
        self, values: list[Value], free: set[int], choose: Callable[[Graph], Collection[int]]
    ) -> Kept:
        graph = self._graph(values, free)
        held = choose(graph.of_required())  # the others are gone by now
        for number, value in enumerate(values):
            if number not in held and not graph.values[number].free:
                value.tensor = None
        kept, numbers = choose(graph), iter(range(len(values)))
        return Kept(
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
            tuple(Operation(s.cost, numbers(s.reads), numbers(s.writes.values()), s.once) for s in self._steps),
            tuple(Weight(v.size, v.saved, v.keepable, id(v) in free) for v in values),
        )


def _is_plain(leaf: Any) -> bool:
    """Whether this is a tensor of which the place in its storage says everything."""
    return (
        type(leaf) in _PLAIN and leaf.layout == torch.strided and not leaf.is_conj() and not leaf.is_neg()
    )


def _noted(leaf: Any, value: Value | None) -> Any:
    if value is not None:
        value.uses += 1
        return _Read(value, View.of(leaf))
    if isinstance(leaf, Tensor):
        return _Given(leaf if leaf.is_leaf else outside_autograd(leaf), leaf._version)
    return leaf


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation takes numbers from a generator."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    return not is_attention(operation) or bool(argument_of("dropout_p", operation, args, kwargs, 0.0))


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The tensors, by id, that an operation writes in place."""
    if not operation._schema.is_mutable:
        return set()
    found: set[int] = set()
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found |= {id(leaf) for leaf in tree_iter(given) if isinstance(leaf, Tensor)}
    return found
