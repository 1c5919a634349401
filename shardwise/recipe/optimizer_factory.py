"""``optimizer.factory``: how it is called, and what the rules for another batch size need to know of its optimizer.

An adaptive optimizer divides its updates by the size of the gradients. Which optimizers of libraries do so is measured:
small parameters are trained on some gradients, and on gradients 1024 times as large. An adaptive optimizer moves them
as far, plain gradient descent 1024 times as far.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import resolve, without_folder
from shardwise.recipe.section import Arguments
from shardwise.recipe.sections import OptimizerSpec

if TYPE_CHECKING:
    from torch import nn

_TIMES = 1024.0
_TRIAL_STEPS = 8
_PARAMETERS: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (8, 4),
    "layers.0.self_attn.q_proj.weight": (4, 4),
    "layers.0.input_layernorm.weight": (4,),
    "lm_head.weight": (8, 4),
}
"""Names and shapes for functions that choose by them."""


def call_factory(factory: Callable[..., Any], spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> Any:
    """What the factory returns: a class is called with the parameters, a function with (name, parameter) pairs.

    Both get ``lr``, if they take it, and the recipe's arguments. Raises whatever the factory raises.
    """
    import torch

    pairs: Any = list(named.items())
    if _is_subclass(factory, torch.optim.Optimizer):
        pairs = list(named.values())
    fixed = "lr" in getattr(factory, "keywords", {})  # of a partial
    takes_rate = "lr" in inspect.signature(factory).parameters and not fixed
    return factory(pairs, **{**({"lr": spec.learning_rate} if takes_rate else {}), **spec.arguments})


def optimizer_label(spec: OptimizerSpec) -> str:
    """The optimizer, in words."""
    return without_folder(spec.factory) or spec.name


class AdamDecay(NamedTuple):
    """Adam's decay rates and epsilon."""

    betas: tuple[float, ...]
    epsilon: float


def adam_decay(spec: OptimizerSpec) -> AdamDecay | None:
    """The values of AdamW, or of an Adam of torch that the factory names; None for any other optimizer."""
    if spec.factory is None:
        return AdamDecay(spec.betas, spec.epsilon) if spec.name.startswith("adam") else None
    factory = _imported_factory(spec)
    if factory is None:
        return None
    import torch

    if not _is_subclass(factory, torch.optim.Adam, torch.optim.AdamW):
        return None
    defaults = {name: parameter.default for name, parameter in inspect.signature(factory).parameters.items()}
    values = {**defaults, **spec.arguments}
    try:
        return AdamDecay(tuple(map(float, values["betas"])), float(values["eps"]))
    except (KeyError, TypeError, ValueError):  # the factory will refuse them, or has others
        return None


def with_adam_decay(spec: OptimizerSpec, decay: AdamDecay) -> OptimizerSpec:
    """The same optimizer with other values."""
    if spec.factory is None:
        return spec.model_copy(update={"betas": decay.betas, "epsilon": decay.epsilon})
    arguments = Arguments({**spec.arguments, "betas": decay.betas, "eps": decay.epsilon})
    return spec.model_copy(update={"arguments": arguments})


def is_adaptive(spec: OptimizerSpec) -> bool | None:
    """Whether updates are divided by the size of gradients; None where the factory cannot be called here."""
    if spec.factory is None:
        return spec.name.startswith("adam")
    factory = _imported_factory(spec)
    return None if factory is None else _is_scale_free(factory, spec)


@lru_cache(maxsize=64)
def _is_scale_free(factory: Callable[..., Any], spec: OptimizerSpec) -> bool | None:
    import torch

    with torch.random.fork_rng(devices=[]):
        try:
            near, far = (_moved_distance(factory, spec, size) for size in (1.0, _TIMES))
        except Exception:  # the library's code, or the user's
            return None
    return far < math.sqrt(_TIMES) * near if near > 0 and math.isfinite(far) else None


def _moved_distance(factory: Callable[..., Any], spec: OptimizerSpec, size: float) -> float:
    """How far parameters move in some steps on gradients of this size."""
    import torch

    chance = torch.Generator().manual_seed(0)
    start = {name: 0.1 * torch.randn(shape, generator=chance) for name, shape in _PARAMETERS.items()}
    named = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    made = call_factory(factory, spec, named)
    for _ in range(_TRIAL_STEPS):
        for name, parameter in named.items():
            parameter.grad = size * (torch.randn(parameter.shape, generator=chance) + start[name])
        for optimizer in made if isinstance(made, list | tuple) else [made]:
            optimizer.step()
    return sum(float((named[name].detach() - value).norm()) for name, value in start.items())


def _imported_factory(spec: OptimizerSpec) -> Callable[..., Any] | None:
    """The factory; None where it cannot be imported, as in a report on a run of another machine."""
    try:
        factory: Callable[..., Any] = resolve(str(spec.factory), "optimizer.factory")
    except RecipeError:
        return None
    return factory


def _is_subclass(factory: Callable[..., Any], *kinds: type) -> bool:
    """Whether it is a class of one of some kinds, or a partial of one."""
    inner = getattr(factory, "func", factory)
    return isinstance(inner, type) and issubclass(inner, kinds)
