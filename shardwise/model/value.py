"""A value of a block's run, and the recipe by which it is computed again: what a tape (model/tape.py) is made of.

What lives is left to reference counting. A value (one storage's content at one time) is held by autograd's handles and
by the recipes that read it; a recipe is held by the values that it writes, and lets go of what it reads once it has
run. So memory is freed as autograd frees what it saves. What is kept when the block ends is kept as autograd's own
saves are in that block (model/kept.py): on the device, or in host memory until the backward pass asks for it.

An operation that draws random numbers runs again from the state that its generator had. One that writes in place
writes to a copy, unless nothing else reads what it writes over. It runs below autograd and autocast, on the arguments
that it had there, so it is the very kernel that ran first. An input, or a kept result, that was written to since the
block ran is an error, as it is in autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_iter, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.model.kept import Kept, keep


@dataclass(frozen=True)
class View:
    """How a tensor lies in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def on(self, tensor: Tensor) -> Tensor:
        """This view of the storage of another tensor."""
        if View.of(tensor) == self:
            return tensor
        if tensor.dtype == self.dtype:
            return tensor.as_strided(self.size, self.stride, self.offset)
        storage = tensor.untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Value:
    """A storage's content at one time: the tensor where it is there or kept, else what it is computed by."""

    __slots__ = ("__weakref__", "keepable", "kept", "recipe", "saved", "size", "tensor", "uses", "version")

    def __init__(self, size: int) -> None:
        self.size = size
        self.recipe: Recipe | None = None
        self.tensor: Tensor | None = None
        self.kept: Kept | None = None
        self.version = 0
        self.uses = 0  # by recipes and handles, ever
        self.saved = False  # by autograd
        self.keepable = True

    def put(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def keep(self, tensor: Tensor) -> None:
        """Hold it until the backward pass, wherever the block's own saves are."""
        self.kept, self.tensor, self.recipe = keep(tensor), None, None

    def get(self) -> Tensor:
        """The tensor, fetched or computed now if need be."""
        if self.kept is not None:
            if (fetched := self.kept.value()) is not None:
                self.put(fetched)
            self.kept = None
        elif self.tensor is None:
            for recipe in self._missing():
                recipe.run()
        if self.tensor is None or self.tensor._version != self.version:
            raise RuntimeError("a result of a block was written to before the backward pass has read it")
        return self.tensor

    def is_there(self) -> bool:
        return self.tensor is not None or self.kept is not None

    def _missing(self) -> list[Recipe]:
        """What has to run, in the order in which it ran first."""
        found: dict[int, Recipe] = {}
        open_values = [self]
        while open_values:
            value = open_values.pop()
            recipe = value.recipe
            if not value.is_there() and recipe is not None and recipe.number not in found:
                found[recipe.number] = recipe
                open_values += [leaf.value for leaf in recipe.leaves if isinstance(leaf, Read)]
        return [found[number] for number in sorted(found)]


@dataclass(frozen=True)
class Read:
    """Stands for an argument that the block has computed."""

    value: Value
    view: View


@dataclass(frozen=True)
class Given:
    """Stands for an argument from outside: an input, a weight."""

    kept: Kept


class Recipe:
    """One operation: how to run it again, and the values that it writes."""

    def __init__(
        self, number: int, operation: Any, leaves: list[Any], spec: TreeSpec, states: States | None
    ) -> None:
        self.number = number
        self.operation = operation
        self.leaves = leaves
        self.spec = spec
        self.states = states
        self.written: list[tuple[int, weakref.ref[Value]]] = []  # by number of the leaf that is written over
        self.returned: list[tuple[int, weakref.ref[Value]]] = []  # by number of the result

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
        if isinstance(leaf, Read):
            return leaf.view.on(copies[number] if number in copies else leaf.value.get())
        if isinstance(leaf, Given):
            if (tensor := leaf.kept.value()) is None:
                raise RuntimeError("an input of a block was written to before the block could be run again")
            return tensor
        return leaf

    def _copy(self, value: Value) -> Tensor:
        tensor = value.get()
        return tensor if value.uses == 1 else tensor.clone()


def _fill(reference: weakref.ref[Value], tensor: Tensor) -> None:
    if (value := reference()) is not None and not value.is_there():
        value.put(tensor)


@dataclass(frozen=True)
class States:
    """What the generators of some devices were at, and what generators an operation was given."""

    cpu: Tensor
    devices: Sequence[int]
    of_devices: Sequence[Tensor]
    given: Sequence[tuple[torch.Generator, Tensor]]

    @classmethod
    def now(cls, leaves: Sequence[Any]) -> States:
        """Of an operation with these arguments: of the devices of its tensors, and of one that it is told."""
        devices = {leaf for leaf in leaves if isinstance(leaf, torch.device)}
        on_them = [torch.empty(0, device=device) for device in devices]
        given = [(leaf, leaf.get_state()) for leaf in leaves if isinstance(leaf, torch.Generator)]
        return cls(torch.get_rng_state(), *get_device_states(*leaves, *on_them), given)


@contextmanager
def _restored(states: States | None) -> Iterator[None]:
    """The generators as they were, and afterwards as they are now."""
    if states is None:
        yield
        return
    now = [(generator, generator.get_state()) for generator, _ in states.given]
    with torch.random.fork_rng(devices=states.devices):
        torch.set_rng_state(states.cpu)
        if states.devices:
            set_device_states(states.devices, states.of_devices)
        for generator, state in states.given:
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)
