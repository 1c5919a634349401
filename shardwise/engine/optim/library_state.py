"""What an optimizer of a library keeps for one parameter, as tensors for a checkpoint or a snapshot.

Libraries keep tensors in the state of a parameter, alone or in lists. They also keep Python numbers: in the state, in
the parameter group (``group["step"]``), in attributes of the optimizer, and in a state of no parameter. The numbers
are stored with each parameter, as one tensor, so that a checkpoint loads under any layout: all parameters of a group
count alike.

Hyperparameters are numbers of groups, too, but they follow from the recipe. So a number outside of a parameter's state
is loaded only if it had moved from its value at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.errors import RecipeError
from shardwise.engine.optim.chunk import distributed_as
from shardwise.engine.optim.norm import local
from shardwise.runtime.torch_private import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

NUMBERS = "python.numbers"
"""Name of the tensor of Python numbers in a stored state."""


def nested(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer, and those in its attributes: a Lookahead has the one that it wraps."""
    every = [optimizer]
    for member in every:  # the list grows while it is read, so wrappers of wrappers are opened too
        every += [v for v in vars(member).values() if isinstance(v, torch.optim.Optimizer) and v not in every]
    return every


# ---- values by owner --------------------------------------------------------------------------------------


class StateOf(MutableMapping[Any, Any]):
    """The state of one parameter. An entry of the optimizer's ``state`` exists only while it has values."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        self._all: MutableMapping[Any, Any] = optimizer.state
        self._parameter = parameter

    def _values(self) -> Mapping[Any, Any]:
        values: Mapping[Any, Any] = self._all.get(self._parameter, {})
        return values

    def __getitem__(self, key: Any) -> Any:
        return self._values()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._all.setdefault(self._parameter, {})[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._all[self._parameter][key]
        if not self._all[self._parameter]:
            del self._all[self._parameter]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


@dataclass(frozen=True)
class Owner:
    """A mapping in which an optimizer keeps values, next to others that it ``skips``."""

    values: MutableMapping[Any, Any]
    skips: Callable[[Any], bool] = lambda key: False

    @property
    def is_state(self) -> bool:
        """Whether it is the state of one parameter."""
        return isinstance(self.values, StateOf)

    def names(self) -> list[Any]:
        """Keys of the values."""
        return [key for key in self.values if not self.skips(key)]

    def read(self) -> dict[Any, Any]:
        """A copy; tensors of one element are copied too."""
        return {key: _copied(self.values[key]) for key in self.names()}

    def write(self, before: Mapping[Any, Any]) -> None:
        """Bring back the values that ``read`` returned."""
        for key in self.names():
            if key not in before:
                del self.values[key]
        # Copied again: ``before`` is written for every parameter, and the optimizer changes tensors in place.
        self.values.update({key: _copied(value) for key, value in before.items()})


def group_owner(group: dict[str, Any]) -> Owner:
    """A parameter group, without the learning rate, which is set before every step."""
    return Owner(group, skips=lambda key: key in ("params", "lr"))


def common_owners(optimizers: Sequence[torch.optim.Optimizer]) -> list[Owner]:
    """Values of the whole optimizer: attributes, and state of no parameter."""
    attributes = [Owner(vars(optimizer), skips=_is_of_torch) for optimizer in optimizers]
    # Some libraries keep values of the whole run in ``state``, under keys that are no parameters.
    states = [Owner(optimizer.state, skips=lambda key: isinstance(key, Tensor)) for optimizer in optimizers]
    return [*attributes, *states]


def _is_of_torch(attribute: str) -> bool:
    """Whether every ``torch.optim.Optimizer`` has this attribute."""
    return attribute in ("param_groups", "state", "defaults") or attribute.startswith("_optimizer_")


_PLAIN = (float, int, bool, NoneType, str)


def _copied(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    return tree_map_only(Tensor, lambda t: t.clone() if is_number(t) else t, value)


def is_number(leaf: Any) -> bool:
    """Whether a value outside of states counts, or is a tensor that does."""
    if isinstance(leaf, Tensor):
        return leaf.numel() == 1 and not isinstance(leaf, nn.Parameter)
    return isinstance(leaf, Real)


# ---- numbers ----------------------------------------------------------------------------------------------

_ABSENT = object()
"""In the place of a value that does not exist."""
_OTHER = object()
"""In the place of a value of another form, which is not stored."""
_CONSTANT, _NOTHING, _NONE, _BOOL, _INT, _FLOAT, _ELEMENT, _TENSOR = map(float, range(8))
"""Kinds of values: one that does not change, none, None, numbers, a tensor of one element, a tensor of a state."""


def _encoded(leaf: Any, is_state: bool) -> tuple[float, float]:
    """(kind, value)."""
    if leaf is None:
        return _NONE, 0.0
    if leaf is _ABSENT:
        return _NOTHING, 0.0
    if isinstance(leaf, Tensor) and is_state:
        return _TENSOR, 0.0
    if not is_number(leaf):
        return _CONSTANT, 0.0
    if isinstance(leaf, Tensor):
        return _ELEMENT, float(leaf)
    if isinstance(leaf, bool):  # before int, of which bool is a subclass
        return _BOOL, float(leaf)
    return (_INT if isinstance(leaf, Integral) else _FLOAT), float(leaf)


def _decoded(kind: float, value: float, like: Any) -> Any:
    if kind == _ELEMENT:
        return torch.full_like(like, value)
    if kind == _NONE:
        return None
    numbers: dict[float, Callable[[float], Any]] = {_BOOL: bool, _INT: int, _FLOAT: float}
    return numbers[kind](value) if kind in numbers else like


# ---- the state of one parameter ---------------------------------------------------------------------------


class _Form(NamedTuple):
    """Of a tensor of a state, on this rank. ``sharded``: it is one of the shards that the parameter has."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device
    sharded: bool


class _Entry(NamedTuple):
    """A value: its owner, how it is nested, and its leaves, with forms in the place of a state's tensors."""

    owner: int
    key: Any
    spec: TreeSpec
    leaves: list[Any]

    def names(self) -> list[str]:
        """Of its leaves. Those of a wrapped optimizer begin with its number, those in a list end with theirs."""
        name = str(self.key) if self.owner == 0 else f"{self.owner}.{self.key}"
        return [name] if len(self.leaves) == 1 else [f"{name}.{at}" for at in range(len(self.leaves))]


class ParameterState:
    """The values of one parameter's update. Their form is learned from a rehearsal; then they are stored and loaded.

    Args:
        owners: the same number and order in every process.
        locally: whether tensors of the shard's shape are shards; else those are DTensors.
    """

    def __init__(self, parameter: nn.Parameter, owners: Sequence[Owner], locally: bool) -> None:
        self._parameter = parameter
        self._locally = locally
        self._entries: list[_Entry] = []
        for number, owner in enumerate(owners):
            for key in sorted(owner.names(), key=str):  # the same order in every process
                leaves, spec = tree_flatten(owner.values[key])
                forms = [self._form(x) if owner.is_state and isinstance(x, Tensor) else x for x in leaves]
                self._entries.append(_Entry(number, key, spec, forms))
        # A row for the entry itself, which may not exist, and one for each of its leaves: (kind, value, has moved).
        rows = sum(1 + len(entry.leaves) for entry in self._entries)
        # fp64 holds floats of Python, and integers up to 2^53, exactly.
        self._numbers = torch.zeros(rows, 3, dtype=torch.float64)
        self.begin(owners)

    def begin(self, owners: Sequence[Owner]) -> None:
        """The present values of ``owners`` are those at the start."""
        self._owners = owners
        self._start = self._rows()
        self.forget()

    def forget(self) -> None:
        """Free the buffers of tensors that the library had not made when the state was stored."""
        self._spare: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state that the library has at present."""
        named = ((name, leaf) for entry in self._entries for name, leaf, _ in self._tensors(entry))
        return {name: leaf for name, leaf in named if isinstance(leaf, Tensor)}

    def stored(self) -> dict[str, Tensor]:
        """All values as tensors. A later ``loaded`` takes over the values that have been written into them."""
        rows = [
            (kind, value, float((kind, value) != start))
            for (kind, value), start in zip(self._rows(), self._start, strict=True)
        ]
        # Into the same tensor: a checkpoint or a snapshot writes into it, and ``loaded`` reads it.
        self._numbers.copy_(torch.tensor(rows, dtype=torch.float64).view(-1, 3))
        tensors = {
            name: self._buffer(name, leaf, form)
            for entry in self._entries
            for name, leaf, form in self._tensors(entry)
        }
        return {NUMBERS: self._numbers, **tensors}

    def loaded(self) -> None:
        """Give the library the values that were written into the tensors of ``stored``."""
        rows = iter(zip(self._numbers.tolist(), self._start, strict=True))
        for entry in self._entries:
            owner = self._owners[entry.owner]
            # Outside of a state, a value that has not moved is a hyperparameter: that of the recipe counts.
            (exists, _), *encoded = [
                (kind, value) if owner.is_state or moved else start
                for (kind, value, moved), start in islice(rows, 1 + len(entry.leaves))
            ]
            if exists == _NOTHING:
                if entry.key in owner.values:
                    del owner.values[entry.key]
            elif owner.is_state or any(kind != _CONSTANT for kind, _ in encoded):
                arguments = zip(entry.names(), self._leaves(entry), entry.leaves, encoded, strict=True)
                leaves = [self._leaf(*leaf_arguments) for leaf_arguments in arguments]
                owner.values[entry.key] = tree_unflatten(leaves, entry.spec)

    def _leaf(self, name: str, present: Any, known: Any, encoded: tuple[float, float]) -> Any:
        if encoded[0] == _TENSOR:
            return self._spare.get(name, present)
        return _decoded(*encoded, known if present is _ABSENT or present is _OTHER else present)

    def _rows(self) -> list[tuple[float, float]]:
        """(kind, value) of every entry, which exists or does not, and of its leaves."""
        rows: list[tuple[float, float]] = []
        for entry in self._entries:
            owner = self._owners[entry.owner]
            rows.append((_CONSTANT if entry.key in owner.values else _NOTHING, 0.0))
            rows += [_encoded(leaf, owner.is_state) for leaf in self._leaves(entry)]
        return rows

    def _leaves(self, entry: _Entry) -> list[Any]:
        """The present leaves of an entry."""
        owner = self._owners[entry.owner]
        if entry.key not in owner.values:
            return [_ABSENT] * len(entry.leaves)
        leaves, spec = tree_flatten(owner.values[entry.key])
        if spec == entry.spec:
            return leaves
        if owner.is_state:
            raise _changed_form(entry.key)
        return [_OTHER] * len(entry.leaves)

    def _tensors(self, entry: _Entry) -> Iterator[tuple[str, Any, _Form]]:
        """(name, present leaf, form) of an entry's tensors."""
        for name, leaf, form in zip(entry.names(), self._leaves(entry), entry.leaves, strict=True):
            if isinstance(form, _Form):
                yield name, leaf, form

    def _form(self, tensor: Tensor) -> _Form:
        piece = local(tensor)
        divided = isinstance(self._parameter, DTensor) and piece.ndim > 0
        # An optimizer on shards makes state of the shard's shape: plain tensors, which are parts of the whole state.
        same = divided and self._locally and piece.shape == local(self._parameter).shape
        return _Form(piece.shape, piece.dtype, piece.device, isinstance(tensor, DTensor) or same)

    def _buffer(self, name: str, leaf: Any, form: _Form) -> Tensor:
        """The library's tensor, or a buffer where it has none of this form."""
        if isinstance(leaf, Tensor) and (local(leaf).shape, leaf.dtype) == (form.size, form.dtype):
            tensor = leaf
        else:
            if name not in self._spare:
                piece = torch.zeros(form.size, dtype=form.dtype, device=form.device)
                self._spare[name] = piece if self._locally else self._as_shard(piece, form)
            tensor = self._spare[name]
            if isinstance(leaf, Tensor):  # a single number in the place of a tensor of equal ones
                if leaf.numel() != 1:
                    raise _changed_form(name)
                local(tensor).copy_(leaf)
        return self._as_shard(tensor, form)

    def _as_shard(self, piece: Tensor, form: _Form) -> Tensor:
        if not form.sharded or isinstance(piece, DTensor):
            return piece
        return distributed_as(self._parameter, piece)


def _changed_form(key: Any) -> RecipeError:
    return RecipeError(
        "the optimizer's state has changed its form",
        where="optimizer.factory",
        why=f"{key} has other tensors than in its first steps, so it cannot be saved",
        fix="use another optimizer",
    )
