"""Any ``torch.optim.Optimizer``: ``optimizer.factory``.

Building it rehearses some steps. So a dry run counts its state, and a checkpoint knows the tensors that it will hold.
Before the first step the library's optimizer is built anew, on the initial weights: it makes its state itself, in its
own first step, as in a plain loop.

Skipping an update reads the verdict on the host, which waits for the device once per step. Code of a library that reads
a value (``item``) waits too. trial.py says which optimizers are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve, without_folder
from shardwise.engine.optim.library_state import ParameterState
from shardwise.engine.optim.optimizer import Optimizer
from shardwise.engine.optim.stepping import SteppedOptimizer
from shardwise.recipe.optimizer_factory import call_factory
from shardwise.recipe.sections import OptimizerSpec


class _Live(Mapping[str, Tensor]):
    """The tensors that a library has at present in the state of a parameter."""

    def __init__(self, state: ParameterState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return self._state.tensors()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.tensors())

    def __len__(self) -> int:
        return len(self._state.tensors())


class LibraryOptimizer(Optimizer):
    """One or several optimizers of a library, as one.

    Args:
        make: builds them.
        rate: the peak learning rate; the rate of a group keeps its ratio to it.
        steps: of the rehearsal: after so many, the library has made all of its state.
        late: see ``SteppedOptimizer.rehearse``.
        one_by_one: see ``SteppedOptimizer``.
    """

    def __init__(
        self,
        make: Callable[[], list[torch.optim.Optimizer]],
        rate: float,
        steps: int = 1,
        late: Mapping[str, float] = {},
        one_by_one: bool | None = None,
    ) -> None:
        self._make = make
        self._rate = rate
        self._one_by_one = one_by_one
        self._build()
        parameters = [{"params": part.parameters} for part in self.parts]
        # Not Optimizer's: there is no update rule, and the state comes from the rehearsal.
        torch.optim.Optimizer.__init__(self, parameters, {})
        self._states: dict[nn.Parameter, ParameterState] = {}
        for part in self.parts:
            self._states.update(part.rehearse(steps, late))
        self.state.update({parameter: _Live(state) for parameter, state in self._states.items()})

    def _build(self) -> None:
        self.parts = [SteppedOptimizer(made, self._one_by_one) for made in self._make()]
        self._ratios = [[float(g.get("lr", self._rate)) / self._rate for g in p.groups] for p in self.parts]

    def start(self) -> None:
        self._build()
        for part in self.parts:
            for member in part.members:
                self._states[member.parameter].begin(part.owners_of(member))

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._states[parameter].stored() if parameter in self._states else {}

    def loaded(self) -> None:
        for state in self._states.values():
            state.loaded()

    def step(self, skip: Tensor) -> None:  # type: ignore[override]
        if not bool(1 - skip):  # waits for the device, once per step
            return
        for state in self._states.values():
            state.forget()
        for part, ratios in zip(self.parts, self._ratios, strict=True):
            for group, ratio in zip(part.groups, ratios, strict=True):
                group["lr"] = self.learning_rate * ratio
            part.step()

    def update(self, parameters: Iterable[nn.Parameter], skip: Tensor) -> None:
        raise NotImplementedError("a rule of technique/in_backward.py excludes it")


def made_by(named: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> list[torch.optim.Optimizer]:
    """The optimizers that the factory makes of parameters by name.

    Raises:
        RecipeError: it cannot be imported, fails, or leaves out or repeats a parameter.
    """
    factory = resolve(str(spec.factory), "optimizer.factory")
    try:
        result = call_factory(factory, spec, named)
    except Exception as error:  # the library's code, or the user's
        raise failed(spec, "cannot be made", error) from error
    made = list(result) if isinstance(result, list | tuple) else [result]
    if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in made):
        raise failed(spec, "must be a torch.optim.Optimizer", TypeError(f"it made {type(result).__name__}"))
    members = [id(p) for optimizer in made for group in optimizer.param_groups for p in group["params"]]
    if sorted(members) != sorted(id(p) for p in named.values()):
        twice = len(members) - len(set(members))
        count = f"it holds {len(set(members))} of {len(named)}, {twice} of them twice"
        raise failed(spec, "must hold every trained parameter once", ValueError(count))
    return made


def failed(spec: OptimizerSpec, what: str, error: Exception) -> RecipeError:
    """A failure of a library's or a user's code, in words."""
    first = (str(error).strip().splitlines() or [""])[0]
    return RecipeError(
        f"the optimizer {what}",
        where=f"optimizer.factory: {without_folder(spec.factory)}",
        why=f"{type(error).__name__}: {first}",
        fix="for other parameters, name a function of (name, parameter) pairs that returns a list of optimizers",
    )
