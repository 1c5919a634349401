"""The trial of a library's optimizer on small parameters: whether it can train here, and under which layouts.

Parameters with the names and numbers of dims of the run's, but few rows, are trained on the same gradients by a plain
loop, by the engine with a checkpoint in the middle, and by the engine one parameter at a time. So these are refused,
with the value that differs:

- an optimizer whose updates depend on all parameters, such as Prodigy's step size, where a rank has a part of them;
- one that draws random numbers, on several ranks;
- one that keeps something that no checkpoint holds, sets its own learning rate, or swaps weights in ``eval()``;
- in fp64, which is for proofs, on several ranks one that amplifies rounding errors. SOAP's eigenvectors are arbitrary
  where gradients have no component, so sums in another order change its updates by percents, in a plain loop too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve, without_folder
from shardwise.engine.optim.library import LibraryOptimizer, failed, made_by
from shardwise.engine.optim.stepping import DependentUpdate, dependent, is_cut
from shardwise.engine.optim.trial_runs import (
    STEPS,
    Narrowing,
    Small,
    TrialRun,
    ValuePath,
    difference,
    different_update,
    engine_run,
    plain_run,
    plain_steps,
    small_like,
    undisturbed,
    wide,
)
from shardwise.recipe.sections import OptimizerSpec

_ROUNDING = 1e-15
"""Relative error of gradients that several ranks sum in fp64."""
_PROOF = 1e-9
"""Largest relative error of an update in a proof."""
_SAME = 1e-12
"""Relative difference of fp64 results of the same operations, which may be called for several tensors at once."""
_CONSTANTS = (Tensor, Real, str, torch.dtype, torch.device, type(None))
"""Types of the values of a state. Strings and the like do not change."""


class Trial(NamedTuple):
    """What the trial showed.

    Attributes:
        steps: after which the library has made all of its state.
        late: values of the states' tensors of one element at the end, by key.
        depends: how the update of a parameter depends on others; "" if it does not.
        draws: whether it draws random numbers.
        amplified: the update that rounding errors of gradients in fp64 change; "" if there is none.
    """

    steps: int
    late: Mapping[str, float]
    depends: str
    draws: bool
    amplified: str


def library_optimizer(
    named: Mapping[str, nn.Parameter], spec: OptimizerSpec, ranks: int = 1, staged: bool = False
) -> LibraryOptimizer:
    """The recipe's optimizer over parameters by name.

    Args:
        ranks: of the run.
        staged: whether other ranks have other parameters of the model.

    Raises RecipeError where it cannot be made or begun, or would not train as on one process.
    """
    with _named_errors(spec):
        trial = tried(named, spec)
        if trial.draws and ranks > 1:
            fix = "train on one device, or use another optimizer"
            raise _refused("this optimizer draws random numbers", "each rank would draw others", fix)
        if trial.depends and (staged or any(map(is_cut, named.values()))):
            raise dependent(trial.depends)
        if trial.amplified and ranks > 1 and any(p.dtype == torch.float64 for p in named.values()):
            what = "this optimizer cannot train in fp64 on several devices"
            why = f"{trial.amplified} differs by more than {_PROOF:.0e} where gradients differ by {_ROUNDING:.0e}"
            raise _refused(what, why, "fp64 is for proofs: set another strategy.precision")
        return LibraryOptimizer(lambda: made_by(named, spec), spec.learning_rate, trial.steps, trial.late)


@contextmanager
def _named_errors(spec: OptimizerSpec) -> Iterator[None]:
    """Have every error name the optimizer."""
    try:
        yield
    except RecipeError as error:
        if error.where == "optimizer.factory":
            error.where += f": {without_folder(spec.factory)}"
        raise
    except Exception as error:  # the library's code
        raise failed(spec, "cannot begin", error) from error


def tried(named: Mapping[str, Tensor], spec: OptimizerSpec) -> Trial:
    """The trial of the recipe's optimizer, once for parameters alike.

    Raises RecipeError if it cannot train, and whatever its own code raises.
    """
    return _tried(resolve(str(spec.factory), "optimizer.factory"), spec, small_like(named))


def rounds(named: Mapping[str, Tensor], spec: OptimizerSpec) -> bool:
    """Whether the recipe's optimizer computes in few bits whatever its weights have, as Muon does, or amplifies."""
    if spec.factory is None:
        return False
    return any(_rounding(resolve(str(spec.factory), "optimizer.factory"), spec, small_like(named)))


@lru_cache(maxsize=64)
def _tried(factory: Any, spec: OptimizerSpec, small: Small) -> Trial:
    with undisturbed():
        return _compared(factory, spec, small)


def _compared(factory: Any, spec: OptimizerSpec, small: Small) -> Trial:
    plain = plain_run(spec, small)
    steps, draws = _examined(plain)  # this trains ``plain``
    if different := difference(plain, engine_run(spec, small, steps, one_by_one=False), _limit(small)):
        what = "a resumed run would not continue with this optimizer"
        raise _refused(what, f"{different} differs after saving and loading")
    narrows, amplified = _rounding(factory, spec, small)
    # One parameter at a time draws other random numbers, so two runs would differ for that alone.
    depends = "" if draws else _dependence(spec, small, steps, narrows)
    late = {path[-2]: float(leaf) for path, leaf in plain.states().items() if _is_float(leaf)}
    return Trial(steps, late, depends, draws, amplified)


def _examined(plain: TrialRun) -> tuple[int, bool]:
    """Train by the plain loop; after how many steps all state is made, and whether random numbers are drawn.

    Raises RecipeError for optimizers that no layout can train.
    """
    _refuse_swaps([part.made for part in plain.parts])
    form: dict[ValuePath, Any] = {}
    steps = 1
    draws = False
    for index, step in enumerate(plain_steps(plain), 1):
        _refuse_own_rates(step.given, step.after)
        draws |= step.drew
        former = form
        form = _form(plain.states())
        if form != former:
            steps = index
        _refuse_new_forms(former, form)
    if steps == STEPS:
        raise _refused("the optimizer makes new state in every step", "the size of its state is not known")
    return steps, draws


def _dependence(spec: OptimizerSpec, small: Small, steps: int, narrows: bool) -> str:
    """How the update of a parameter depends on others; "" if it does not. In fp64, where it works in fp64.

    In 16 bits, a product of several matrices at once rounds otherwise than one of each alone; a proof does not allow
    for that.
    """
    proves = any(dtype == torch.float64 for _, _, dtype in small)
    limit = math.sqrt(torch.finfo(torch.bfloat16).eps) if narrows and not proves else _SAME
    try:
        return _alone(spec, wide(small), steps, limit)
    except Exception:  # the library's code
        return _alone(spec, small, steps, max(limit, _limit(small)))


def _alone(spec: OptimizerSpec, small: Small, steps: int, limit: float) -> str:
    plain = plain_run(spec, small)
    list(plain_steps(plain))  # trains it
    try:
        different = difference(plain, engine_run(spec, small, steps, one_by_one=True), limit)
    except DependentUpdate as error:
        return error.why
    return f"{different} differs where each parameter is updated alone" if different else ""


def _limit(small: Small) -> float:
    """Largest relative difference of runs in the dtypes of parameters that are taken to be the same."""
    return math.sqrt(min(torch.finfo(dtype).eps for _, _, dtype in small))


@lru_cache(maxsize=64)
def _rounding(factory: Any, spec: OptimizerSpec, small: Small) -> tuple[bool, str]:
    """Whether it computes in few bits; the update that rounding errors of gradients in fp64 change, or ""."""
    with undisturbed(), Narrowing() as narrowing:
        try:
            exact = plain_run(spec, wide(small))
            rounded = plain_run(spec, wide(small))
            list(plain_steps(exact))
            list(plain_steps(rounded, _ROUNDING))
        except Exception:  # the library's code, which takes no fp64
            return True, ""
    return narrowing.seen, different_update(exact, rounded, _PROOF)


def _form(states: Mapping[ValuePath, Any]) -> dict[ValuePath, Any]:
    """Shapes and types of the values of states. Raises RecipeError for an object that has none."""
    for path, leaf in states.items():
        if not isinstance(leaf, _CONSTANTS):
            why = f"{path[-2]} is of the type {type(leaf).__name__}"
            raise _refused("the optimizer keeps objects that no checkpoint holds", why)
    return {
        path: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else isinstance(leaf, Real)
        for path, leaf in states.items()
    }


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.is_floating_point()


# ---- refusals ---------------------------------------------------------------------------------------------


def _refuse_swaps(made: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in made:
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
            what = "the optimizer has other weights for evaluation than for training"
            raise _refused(what, "its train() and eval() swap them, and are not called")


def _refuse_own_rates(given: Sequence[float], after_step: Sequence[float]) -> None:
    for before, after in zip(given, after_step, strict=True):
        if before != after:
            why = f"lr is {after:.4g} after a step with {before:.4g}; the schedule sets it before every step"
            raise _refused("the optimizer sets its own learning rate", why)


def _refuse_new_forms(former: Mapping[ValuePath, Any], form: Mapping[ValuePath, Any]) -> None:
    """A list of another length, or an entry that is gone, does not fit a checkpoint of fixed form."""
    # A new entry is fine, because the rehearsal goes on until there is none; a new leaf of an old entry is not.
    keys = {path[:-1] for path in former}
    for path in former.keys() ^ form.keys():
        if path in former or path[:-1] in keys:
            raise _refused(
                "the optimizer's state changes its form", f"{path[-2]} has not the same length in all steps"
            )


def _refused(what: str, why: str, fix: str = "use another optimizer") -> RecipeError:
    return RecipeError(what, where="optimizer.factory", why=why, fix=fix)
