"""One optimizer of a library, stepped on DTensors as if it ran on one process.

It gets *stand-ins*: plain parameters on the memory of this rank's shards, all at once. That is right for an optimizer
that works element by element, and for parameters that each rank has in full. Any other optimizer may look at whole
matrices, such as Adafactor, Muon or SOAP. Then one parameter after the other is gathered with its gradient and its
state, updated on every rank alike, and cut again. At most one whole parameter is in memory. State of the parameter's
shape is sharded like it between steps; other state, such as Adafactor's factors, is on every rank.

Every call for one parameter begins with the values outside of the states, such as ``group["step"]``, that were there
before the step. After the last they have moved on once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.core.errors import RecipeError
from shardwise.engine.optim.chunk import distributed_as
from shardwise.engine.optim.library_state import (
    Owner,
    ParameterState,
    StateOf,
    common_owners,
    group_owner,
    nested,
)
from shardwise.runtime.parallel.shard_slices import gather, local_part, local_slices
from shardwise.runtime.torch_private import storage_key, tree_flatten, tree_map_only, tree_unflatten

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers of torch whose update of an element depends on that element alone: they work on shards."""


class DependentUpdate(RecipeError):
    """The update of a parameter depends on others, so it cannot be stepped alone."""


def dependent(why: str) -> DependentUpdate:
    return DependentUpdate(
        "this optimizer needs all parameters on every rank",
        where="optimizer.factory",
        why=why,
        fix="set strategy.zero_stage: 0 and use data parallelism only, or use another optimizer",
    )


def is_cut(parameter: Tensor) -> bool:
    """Whether a rank has only a part of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    ranks = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return any(size > 1 and not placement.is_replicate() for size, placement in ranks)


def works_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    return all(type(nested_optimizer) in ELEMENTWISE for nested_optimizer in nested(optimizer))


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter, its stand-in, the indices of its groups, and what belongs to it alone."""

    parameter: nn.Parameter
    stand_in: nn.Parameter
    groups: list[int]
    states: list[StateOf]


class SteppedOptimizer:
    """An optimizer over stand-ins for its parameters.

    Args:
        made: holds the parameters of the run.
        one_by_one: whether each parameter is updated by a call of its own; None where it must.
    """

    def __init__(self, made: torch.optim.Optimizer, one_by_one: bool | None = None) -> None:
        self.made = made
        self._optimizers = nested(made)
        # By identity: a wrapper usually shares the groups of the optimizer that it wraps.
        groups = {id(group): group for optimizer in self._optimizers for group in optimizer.param_groups}
        self.groups = list(groups.values())
        self.parameters: list[nn.Parameter] = [p for group in made.param_groups for p in group["params"]]
        must = not works_on_shards(made) and any(map(is_cut, self.parameters))
        self.one_by_one = must if one_by_one is None else one_by_one
        self.owners = [*map(group_owner, self.groups), *common_owners(self._optimizers)]
        self.members = list(map(self._member, self.parameters))
        # After all members are made, because they look for their parameters in the groups.
        stand_ins = {member.parameter: member.stand_in for member in self.members}
        for group in self.groups:
            group["params"] = [stand_ins[p] for p in group["params"]]

    def _member(self, parameter: nn.Parameter) -> Member:
        """With the state that the library made when it was built, as Adagrad does."""
        # ``in`` would compare values: ``==`` of tensors is elementwise.
        indices = [at for at, group in enumerate(self.groups) if any(p is parameter for p in group["params"])]
        stand_in = parameter
        if self.one_by_one or isinstance(parameter, DTensor):
            piece = _nothing(parameter) if self.one_by_one else local_part(parameter)
            stand_in = nn.Parameter(piece, parameter.requires_grad)
            for optimizer in self._optimizers:
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    between_steps = partial(self._between_steps, parameter)
                    optimizer.state[stand_in] = tree_map_only(DTensor, between_steps, state)
        states = [StateOf(optimizer, stand_in) for optimizer in self._optimizers]
        return Member(parameter, stand_in, indices, states)

    def _between_steps(self, parameter: nn.Parameter, value: DTensor) -> Tensor:
        """A tensor of a state that was made from a DTensor, as this optimizer keeps it between steps."""
        if value.shape != parameter.shape or not value.ndim:
            return value.full_tensor()
        return value if self.one_by_one else local_part(value)

    def owners_of(self, member: Member) -> list[Owner]:
        """Where it keeps values for a parameter: the states, the groups, and what all parameters share."""
        states = [Owner(state) for state in member.states]
        return [*states, *(self.owners[at] for at in member.groups), *self.owners[len(self.groups) :]]

    def rehearse(self, steps: int, late: Mapping[str, float]) -> dict[nn.Parameter, ParameterState]:
        """Step each parameter alone, with arbitrary weights and gradients, and learn the form of its state.

        Weights are overwritten.

        Args:
            late: values of states' tensors of one element after some steps. A dry run reads them in its step.
        """
        before = self._read()
        for member in self.members:
            self._write(before)  # ``group["step"]`` and the like count from the start for each parameter
            with self._only(member):
                for number in range(steps):
                    self._rehearse(member, number)
            for state in member.states:
                state.update({key: _with_value(value, late.get(str(key))) for key, value in state.items()})
        locally = not self.one_by_one
        return {m.parameter: ParameterState(m.parameter, self.owners_of(m), locally) for m in self.members}

    def _rehearse(self, member: Member, number: int) -> None:
        shape = member.parameter.shape if self.one_by_one else local_part(member.parameter).shape
        weight, grad = (_arbitrary(shape, member.parameter, shift) for shift in (1, number + 2))
        if self.one_by_one:
            self._update(member, weight, grad)
        else:
            local_part(member.parameter).copy_(weight)
            member.stand_in.grad = grad
            self.made.step()
            member.stand_in.grad = None

    def step(self) -> None:
        if self.one_by_one:
            self._step_one_by_one()
            return
        sharded = [m for m in self.members if m.stand_in is not m.parameter]
        for member in sharded:
            grad = member.parameter.grad
            # Set anew in each step, because the library may have replaced ``data`` in the last one.
            member.stand_in.data = local_part(member.parameter)
            member.stand_in.grad = None if grad is None else local_part(grad)
        self.made.step()
        for member in sharded:
            member.stand_in.grad = None
            _put(member.stand_in.detach(), local_part(member.parameter))

    def _step_one_by_one(self) -> None:
        before = self._read()
        # By index of the owner: values after a parameter's call. Those of later calls must be equal.
        after: dict[int, dict[Any, Any]] = {}
        last = before
        for member in self.members:
            grad = member.parameter.grad
            if grad is None:
                continue
            self._write(before)
            with self._only(member):
                self._update(member, gather(member.parameter), gather(grad))
            last = self._read()
            # The parameter's own groups, and the values that all parameters share, which come after the groups.
            for at in (*member.groups, *range(len(self.groups), len(last))):
                _require_same(after.setdefault(at, last[at]), last[at])
        self._write([after.get(at, values) for at, values in enumerate(last)])

    @torch.no_grad()
    def _update(self, member: Member, weight: Tensor, grad: Tensor) -> None:
        """Update one whole parameter, and cut it and its state again."""
        parameter = member.parameter
        stand_in = member.stand_in
        stand_in.data = weight
        stand_in.grad = grad
        # The shards as they were: afterwards the new state is cut into the same memory.
        shards = [{key: tree_flatten(value)[0] for key, value in state.items()} for state in member.states]
        for state in member.states:
            state.update({key: tree_map_only(DTensor, gather, value) for key, value in state.items()})
        with torch.enable_grad():  # as in a plain loop: the library's code decides what it records
            self.made.step()
        _put(stand_in.detach()[local_slices(parameter)], local_part(parameter))
        for state, pieces in zip(member.states, shards, strict=True):
            for key, value in list(state.items()):
                leaves, spec = tree_flatten(value)
                former = pieces.get(key, [])
                if len(former) != len(leaves):  # the library has made this value in this step
                    former = [None] * len(leaves)
                cuts = [_cut(parameter, leaf, old) for leaf, old in zip(leaves, former, strict=True)]
                state[key] = tree_unflatten(cuts, spec)
        stand_in.data = _nothing(parameter)  # frees the whole parameter
        stand_in.grad = None

    def _read(self) -> list[dict[Any, Any]]:
        """All values outside of the states of parameters."""
        return [owner.read() for owner in self.owners]

    def _write(self, values: Sequence[dict[Any, Any]]) -> None:
        for owner, before in zip(self.owners, values, strict=True):
            owner.write(before)

    @contextmanager
    def _only(self, member: Member) -> Iterator[None]:
        """In this block the optimizer has one parameter."""
        before = [group["params"] for group in self.groups]
        for at, group in enumerate(self.groups):
            group["params"] = [member.stand_in] if at in member.groups else []
        try:
            yield
        finally:
            for group, parameters in zip(self.groups, before, strict=True):
                group["params"] = parameters


def _nothing(parameter: Tensor) -> Tensor:
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _with_value(tensor: Any, value: float | None) -> Any:
    """A tensor of one element with another value, which the fake mode of a dry run then knows."""
    if value is None or not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or tensor.numel() != 1:
        return tensor
    # In fake mode ``torch.tensor`` makes a constant. The list is nested to give it its dims.
    values: Any = value
    for _ in range(tensor.ndim):
        values = [values]
    return torch.tensor(values, dtype=tensor.dtype, device=tensor.device)


def _put(source: Tensor, target: Tensor) -> None:
    """Copy, unless the library has written into the target's own memory."""
    if storage_key(source.untyped_storage()) != storage_key(target.untyped_storage()):
        target.copy_(source)


def _cut(parameter: nn.Parameter, leaf: Any, former: Any) -> Any:
    """A tensor of the parameter's shape as this rank's shard, in the memory of the former one; else the leaf itself."""
    if not isinstance(parameter, DTensor) or not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    if leaf.shape != parameter.shape or not leaf.ndim:
        return leaf
    piece = leaf[local_slices(parameter)]
    if isinstance(former, DTensor) and former.dtype == leaf.dtype:
        local_part(former).copy_(piece)
        return former
    return distributed_as(parameter, piece.clone())


def _require_same(first: dict[Any, Any], other: dict[Any, Any]) -> None:
    """Raise DependentUpdate where a number depends on the parameter that was updated."""
    for key, value in first.items():
        pairs = zip(tree_flatten(value)[0], tree_flatten(other.get(key))[0], strict=False)
        for a, b in pairs:
            if not isinstance(a, Real) or not isinstance(b, Real):
                continue
            if a != b and not (math.isnan(a) and math.isnan(b)):
                raise dependent(f"{key} is computed from all parameters")


def _arbitrary(shape: torch.Size, like: Tensor, shift: int) -> Tensor:
    """Values between -1 and 1, a matrix of full rank, without a random generator."""
    # Sines of equal steps would make a matrix of rank 2: sin(a + b) = sin a cos b + cos a sin b.
    count = torch.arange(shift, shift + shape.numel(), dtype=torch.float32, device=like.device)
    return count.square_().mul_(0.7391).sin_().to(like.dtype).view(shape)
