"""Runs of a library's optimizer on small parameters: in a loop of the library alone, and as the engine steps it.

The gradients are the same in all runs. They do not depend on the weights, so a run shows the optimizer alone. Their
norms differ widely, up to the recipe's clip_norm: a norm from which the library itself clips is among them.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.engine.optim.library import LibraryOptimizer, made_by
from shardwise.engine.optim.stepping import SteppedOptimizer
from shardwise.recipe.sections import OptimizerSpec
from shardwise.runtime.generators import generators_kept
from shardwise.runtime.torch_private import DispatchMode, tree_flatten, tree_iter, without_modes

STEPS = 12
_SIZES = (6, 5, 4)
"""Most elements of the dims of a small parameter; of later dims the last."""
_ALIKE = 2
"""Most parameters whose names differ only in the numbers of blocks."""

Small = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""(name, shape, dtype) of small parameters."""
ValuePath = tuple[str, ...]
"""Where an optimizer keeps a value: kind and number of the owner, key, index of the leaf."""


@dataclass(frozen=True)
class TrialRun:
    """Trained small parameters, with the optimizers that trained them."""

    parameters: Mapping[str, nn.Parameter]
    parts: Sequence[SteppedOptimizer]
    clip_norm: float | None

    def contents(self) -> dict[ValuePath, Any]:
        """All values that the optimizers keep."""
        values: dict[ValuePath, Any] = {}
        for number, part in enumerate(self.parts):
            owners = [("outside", at, owner) for at, owner in enumerate(part.owners)]
            states = [owner for m in part.members for owner in part.owners_of(m)[: len(m.states)]]
            owners += [("state", at, owner) for at, owner in enumerate(states)]
            for kind, at, owner in owners:
                for key in owner.names():
                    for index, leaf in enumerate(tree_flatten(owner.values[key])[0]):
                        values[kind, f"{number}.{at}", str(key), str(index)] = leaf
        return values

    def states(self) -> dict[ValuePath, Any]:
        """Of these values, those in the states of parameters."""
        return {path: leaf for path, leaf in self.contents().items() if path[0] == "state"}


def plain_run(spec: OptimizerSpec, small: Small) -> TrialRun:
    """Small parameters with the library's own optimizers. Raises RecipeError if they cannot be made."""
    parameters = small_parameters(small)
    parts = [SteppedOptimizer(made, one_by_one=False) for made in made_by(parameters, spec)]
    return TrialRun(parameters, parts, spec.clip_norm)


class PlainStep(NamedTuple):
    """The learning rates of the groups before and after a step, and whether it drew random numbers."""

    given: list[float]
    after: list[float]
    drew: bool


def plain_steps(run: TrialRun, error: float = 0.0) -> Iterator[PlainStep]:
    """Train by a plain loop.

    Args:
        error: of rounding, in the gradients.
    """
    optimizers = [part.made for part in run.parts]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [float(group.get("lr", 1.0)) for group in groups]
    for index in range(STEPS):
        give_gradients(run.parameters, index, run.clip_norm, error)
        rates = [peak * (index + 1) / STEPS for peak in peaks]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        before = _generators()
        for optimizer in optimizers:
            optimizer.step()
        yield PlainStep(rates, [group["lr"] for group in groups], before != _generators())


def engine_run(spec: OptimizerSpec, small: Small, steps: int, one_by_one: bool) -> TrialRun:
    """Trained as the engine does; with all parameters at once, also saved and loaded in the middle."""
    parameters, optimizer = _started(spec, small, steps, one_by_one)
    for index in range(STEPS):
        if index == STEPS // 2 and not one_by_one:
            # As a checkpoint does it: tensors by name, into an optimizer that is built anew.
            weights = {name: p.detach().clone() for name, p in parameters.items()}
            saved = {n: {k: t.clone() for k, t in optimizer.stored(p).items()} for n, p in parameters.items()}
            parameters, optimizer = _started(spec, small, steps, one_by_one, weights)
            for name, parameter in parameters.items():
                for key, tensor in optimizer.stored(parameter).items():
                    tensor.copy_(saved[name][key])
            optimizer.loaded()
        give_gradients(parameters, index, spec.clip_norm)
        optimizer.learning_rate = spec.learning_rate * (index + 1) / STEPS
        optimizer.step(torch.zeros(()))
    return TrialRun(parameters, optimizer.parts, spec.clip_norm)


def _started(
    spec: OptimizerSpec,
    small: Small,
    steps: int,
    one_by_one: bool,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, nn.Parameter], LibraryOptimizer]:
    parameters = small_parameters(small)
    start = {name: p.detach().clone() for name, p in parameters.items()} if weights is None else weights
    optimizer = LibraryOptimizer(lambda: made_by(parameters, spec), spec.learning_rate, steps, {}, one_by_one)
    for name, parameter in parameters.items():  # the rehearsal has overwritten them
        parameter.detach().copy_(start[name])
    optimizer.start()
    return parameters, optimizer


# ---- parameters and gradients -----------------------------------------------------------------------------


def small_like(named: Mapping[str, Tensor]) -> Small:
    """The first parameters of each kind of name, with as many dims as they have."""
    small: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    alike: Counter[str] = Counter()
    for name, parameter in named.items():
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "#", name)  # "layers.3.norm" is "layers.#.norm"
        alike[kind] += 1
        if alike[kind] <= _ALIKE:
            sizes = (*_SIZES, *[_SIZES[-1]] * parameter.ndim)
            shape = tuple(min(pair) for pair in zip(parameter.shape, sizes, strict=False))
            small.append((name, shape, parameter.dtype))
    return tuple(small)


def wide(small: Small) -> Small:
    """The same in fp64."""
    return tuple((name, shape, torch.float64) for name, shape, _ in small)


def small_parameters(small: Small) -> dict[str, nn.Parameter]:
    chance = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(s, generator=chance).to(dtype)) for name, s, dtype in small}


def give_gradients(
    parameters: Mapping[str, nn.Parameter], index: int, clip_norm: float | None, error: float = 0.0
) -> None:
    """Of step ``index``: one direction in all steps, and noise. Those of matrices have rank 2, as of two tokens.

    Generators of random numbers are seeded, too, as the trainer does in every step.
    """
    steady = torch.Generator().manual_seed(1)
    chance = torch.Generator().manual_seed(2 + index)
    # From 1/16 to 16: an optimizer that clips by a norm of its own does so in some of the steps.
    size = 4.0 ** (index % 5 - 2)
    for p in parameters.values():
        direction, noise = (_random_gradient(p.shape, generator) for generator in (steady, chance))
        p.grad = (size * (0.1 * direction + 0.05 * noise)).to(p.dtype)
        # Drawn without an error too, so that the generator gives the same gradients to both runs.
        p.grad *= 1 + error * torch.randn(p.shape, generator=chance, dtype=p.dtype)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters.values(), clip_norm)
    torch.manual_seed(index)
    random.seed(index)
    np.random.seed(index)


def _random_gradient(shape: torch.Size, chance: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=chance, dtype=torch.float64)
    # The product of one column and one row: a matrix of rank 1.
    return torch.outer(values[:, 0], values[0]) if len(shape) == 2 else values


@contextmanager
def undisturbed() -> Iterator[None]:
    """Real tensors in a dry run too, one thread, and the generators of random numbers as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with without_modes(), generators_kept(), torch.enable_grad():
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _generators() -> tuple[Any, ...]:
    """The states of the generators of random numbers."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy[1].tobytes(), numpy[2]


class Narrowing(DispatchMode):
    """Looks for operations that take 64 bits and return numbers of 16 or 8."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operands = (t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor))
        if any(t.dtype == torch.float64 for t in operands):
            results = (t for t in tree_iter(out) if isinstance(t, Tensor))
            self.seen |= any(t.itemsize < 4 and t.dtype != torch.bool for t in results)
        return out


# ---- differences ------------------------------------------------------------------------------------------


def difference(plain: TrialRun, other: TrialRun, limit: float) -> str:
    """The key of a value, or the name of a parameter, that differs; "" without one."""
    expected = plain.contents()
    contents = other.contents()
    for path in sorted(expected.keys() | contents.keys()):
        if not _equal(expected.get(path), contents.get(path), limit):
            return path[-2]
    return different_update(plain, other, limit)


def different_update(plain: TrialRun, other: TrialRun, limit: float) -> str:
    """The parameter whose way from the start differs, relative to the longest element of it; "" without one."""
    start = small_parameters(tuple((n, tuple(p.shape), p.dtype) for n, p in plain.parameters.items()))
    for name, expected in plain.parameters.items():
        first, second = (p.detach() - start[name].detach() for p in (expected, other.parameters[name]))
        if not _equal(first, second, limit):
            return f"the update of {name}"
    return ""


def _equal(a: Any, b: Any, limit: float) -> bool:
    """Whether values differ by no more than a limit, relative to the largest."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if not a.is_floating_point() or a.dtype != b.dtype:
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        a, b = a.detach().double(), b.detach().double()
        # Divided by 1e-300, whatever is not 0 differs from a tensor of zeros.
        scale = max(float(a.abs().nan_to_num().max()), 1e-300) if a.numel() else 1.0
        return a.shape == b.shape and torch.allclose(a / scale, b / scale, rtol=0, atol=limit, equal_nan=True)
    if isinstance(a, Real) and isinstance(b, Real):
        return math.isclose(a, b, rel_tol=limit) or (math.isnan(a) and math.isnan(b))
    return not any(isinstance(value, (Tensor, Real)) for value in (a, b))
