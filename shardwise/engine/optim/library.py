"""Any ``torch.optim.Optimizer``: ``optimizer.factory``.

Its state is made when it is built, as that of the rules is, so a dry run counts it and a checkpoint holds it.
Parameters and gradients are those of the run, DTensors where they are sharded. An optimizer that looks at whole
matrices, such as Adafactor or Muon, gets them one by one (gathered.py).

Skipping an update reads the verdict on the host, which waits for the device once per step. Code of a library that reads
a value (``item``) waits too. Python numbers in its state become tensors; what it keeps elsewhere, in its groups for
example, is not saved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve
from shardwise.engine.optim.gathered import GatheredOptimizer, needs_whole
from shardwise.engine.optim.optimizer import Optimizer
from shardwise.recipe.sections import OptimizerSpec
from shardwise.runtime.torch_private import state_maker


class LibraryOptimizer(Optimizer):
    """One or several optimizers of a library, as one.

    Args:
        rate: the peak learning rate; the rate of a group keeps its ratio to it.
    """

    def __init__(self, made: Sequence[torch.optim.Optimizer], rate: float) -> None:
        groups = [group for each in made for group in each.param_groups]
        torch.optim.Optimizer.__init__(self, [{"params": list(group["params"])} for group in groups], {})
        self._groups = groups
        self._ratios = [float(group.get("lr", rate)) / rate for group in groups]
        self._made = [GatheredOptimizer(each, _begin) if needs_whole(each) else each for each in made]
        for each in self._made:
            if not isinstance(each, GatheredOptimizer):
                _begin(each)
            held: Mapping[Any, Any] = each.state
            self.state.update(held)

    def step(self, skip: Tensor) -> None:  # type: ignore[override]
        updated = 1 - skip
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            group["lr"] = self.learning_rate * ratio
        if bool(updated):
            for each in self._made:
                each.step()

    def update(self, parameters: Iterable[nn.Parameter], skip: Tensor) -> None:
        raise NotImplementedError("a rule of technique/in_backward.py excludes it")


def library_optimizer(named: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> LibraryOptimizer:
    """The recipe's optimizer over parameters by name. Raises RecipeError where it cannot be made or begun."""
    made = made_by(named, spec)
    try:
        return LibraryOptimizer(made, spec.learning_rate)
    except Exception as error:  # the library's code
        raise _error(spec, "cannot begin", error) from error


def made_by(named: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> list[torch.optim.Optimizer]:
    """What the factory returns: a class is called with the parameters, a function with (name, parameter) pairs.

    Both get ``lr``, if they take it, and the recipe's arguments. A function may return several optimizers.

    Raises:
        RecipeError: it cannot be imported, fails, or leaves out or repeats a parameter.
    """
    factory: Any = resolve(str(spec.factory), "optimizer.factory")
    inner = getattr(factory, "func", factory)  # of a partial
    whole = isinstance(inner, type) and issubclass(inner, torch.optim.Optimizer)
    given: Any = list(named.values()) if whole else list(named.items())
    rate = {"lr": spec.learning_rate} if _takes_rate(factory) else {}
    try:
        found = factory(given, **{**rate, **spec.arguments})
    except Exception as error:  # the library's code, or the user's
        raise _error(spec, "cannot be made", error) from error
    made = list(found) if isinstance(found, list | tuple) else [found]
    if not all(isinstance(each, torch.optim.Optimizer) for each in made):
        raise _error(spec, "must be a torch.optim.Optimizer", TypeError(f"it made {type(found).__name__}"))
    held = [id(p) for each in made for group in each.param_groups for p in group["params"]]
    if sorted(held) != sorted(id(p) for p in named.values()):
        count = f"it holds {len(set(held))} of {len(named)}, {len(held) - len(set(held))} of them twice"
        raise _error(spec, "must hold every trained parameter once", ValueError(count))
    return made


ROUNDING: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Muon,)
"""Optimizers that compute in 16 bits whatever the dtype of the weights."""


def rounds(named: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> bool:
    """Whether the recipe's optimizer computes in fewer digits than the weights have."""
    return spec.factory is not None and any(isinstance(each, ROUNDING) for each in made_by(named, spec))


def _takes_rate(factory: Callable[..., Any]) -> bool:
    parameters = inspect.signature(factory).parameters
    fixed = "lr" in getattr(factory, "keywords", {})  # of a partial
    return "lr" in parameters and not fixed


def _error(spec: OptimizerSpec, what: str, error: Exception) -> RecipeError:
    first = (str(error).strip().splitlines() or [""])[0]
    return RecipeError(
        f"the optimizer {what}",
        where=f"optimizer.factory: {spec.factory}",
        why=f"{type(error).__name__}: {first}",
        fix="for other parameters, name a function of (name, parameter) pairs that returns a list of optimizers",
    )


@torch.no_grad()
def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of every parameter, with the values that it has before the first step.

    torch's optimizers have a function for it. Others are stepped once with gradients of zero, and their state is
    set to zero; the values of the parameters do not matter here, because they are filled afterwards.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    initialise = state_maker(optimizer)
    if initialise is not None:
        for group in optimizer.param_groups:
            initialise(group)
    else:
        optimizer.step()
    for state in optimizer.state.values():
        for name, value in list(state.items()):
            if isinstance(value, Tensor) and initialise is None:
                value.zero_()
            elif isinstance(value, int | float):
                state[name] = torch.tensor(0.0 if initialise is None else float(value))
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
