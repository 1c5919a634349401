"""A recipe from Python objects: a module, a loss, a dataset, an optimizer, a schedule, callbacks.

The recipe is like one from a file, except that it names its objects ``python:NAME`` (core/user_objects.py). So plan,
training loop and own loop treat it like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.core.call_signatures import Call, require_accepts
from shardwise.core.errors import RecipeError
from shardwise.core.user_objects import GIVEN
from shardwise.hardware.this_gpu import device_here
from shardwise.model.object_model import GivenModel
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS


@dataclass(frozen=True)
class Given:
    """A recipe, and the objects that it names, by name."""

    recipe: Recipe
    objects: Mapping[str, object]


class _AsMultiplier:
    """A schedule of the step alone as one of the step and the number of steps."""

    def __init__(self, function: Callable[[int], float]) -> None:
        self._function = function

    def __call__(self, step: int, steps: int) -> float:
        return self._function(step)


def recipe_from(
    module: nn.Module,
    loss: Callable[..., Any],
    dataset: Any,
    folder: Path | None,
    *,
    steps: int,
    batch_size: int,
    optimizer: Any = None,
    schedule: Any = None,
    cluster: str | Mapping[str, Any] = "auto",
    callbacks: Sequence[object] = (),
    compute_metrics: Callable[..., Any] | None = None,
    sections: Mapping[str, Any] | None = None,
) -> Given:
    """The recipe of these objects.

    Args:
        folder: for the module's weights; it must outlive the run. None leaves them out, for a plan.
        sections: further keys of a recipe.

    Raises:
        RecipeError: a key is wrong, or an object cannot be used.
    """
    objects: dict[str, object] = {"model": GivenModel(module, loss, dataset, folder)}
    values: dict[str, Any] = dict(sections or {})
    values |= {"model": {"factory": f"{GIVEN}:model"}, "steps": steps, "batch_size": batch_size}
    values["cluster"] = {**cluster_named(cluster), **values.get("cluster", {})}
    values["optimizer"] = {**_optimizer_section(optimizer, objects), **values.get("optimizer", {})}
    values["schedule"] = {**_schedule_section(schedule, objects), **values.get("schedule", {})}
    if compute_metrics is not None:
        require_accepts(compute_metrics, "compute_metrics", Call(("predictions", "batch")))
        objects["compute_metrics"] = compute_metrics
        metrics = {"metrics": f"{GIVEN}:compute_metrics"}
        values["evaluation"] = {**values.get("evaluation", {}), **metrics}
    recipe = recipe_of(values, SETTINGS)
    return with_callbacks(Given(recipe, objects), callbacks)


def with_callbacks(given: Given, callbacks: Sequence[object]) -> Given:
    """The same with further callbacks: objects or classes. Raises RecipeError for a method of another signature."""
    for callback in callbacks:
        own = () if isinstance(callback, type) else inspect.getmembers(callback, callable)
        for name, method in own:
            if name.startswith("on_"):
                require_accepts(method, f"callbacks: {type(callback).__name__}", Call(("values",)))
    named = {f"callback_{number}": callback for number, callback in enumerate(callbacks)}
    targets = (*given.recipe.callbacks, *(f"{GIVEN}:{name}" for name in named))
    return Given(given.recipe.model_copy(update={"callbacks": targets}), {**given.objects, **named})


def cluster_named(cluster: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The section ``cluster`` of a recipe: auto is this machine, with all of its GPUs if it has any.

    Raises RecipeError for a GPU of a generation that no profile describes.
    """
    if not isinstance(cluster, str):
        return cluster
    if cluster != "auto":
        return {"preset": cluster}
    if not torch.cuda.is_available():
        return {"device": "cpu"}
    return {"device": device_here(), "devices_per_node": torch.cuda.device_count()}


def _optimizer_section(optimizer: Any, objects: dict[str, object]) -> dict[str, Any]:
    """The section ``optimizer``; a plain loop does not clip, so an optimizer that is given does not either."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, str):
        return {"name": optimizer}
    if isinstance(optimizer, Mapping):  # the section of a recipe, as of every other key
        return dict(optimizer)
    if not callable(optimizer):
        why = f"it is a {type(optimizer).__name__}, and holds the parameters of this process"
        fix = "give its class, or functools.partial(torch.optim.Adafactor, lr=1e-2)"
        raise RecipeError("the optimizer is no class or function", where="optimizer", why=why, fix=fix)
    objects["optimizer"] = optimizer
    section: dict[str, Any] = {"factory": f"{GIVEN}:optimizer", "clip_norm": None}
    rate = optimizer.keywords.get("lr") if isinstance(optimizer, partial) else None
    if rate is None:
        default = inspect.signature(optimizer).parameters.get("lr")
        rate = default.default if default is not None else None
    if isinstance(rate, int | float) and rate > 0:
        section["learning_rate"] = float(rate)
    return section


def _schedule_section(schedule: Any, objects: dict[str, object]) -> dict[str, Any]:
    """The section ``schedule``: constant without one, as in a plain loop."""
    if schedule is None:
        return {"name": "constant", "warmup": 0}
    if isinstance(schedule, str):
        return {"name": schedule}
    if isinstance(schedule, Mapping):
        return dict(schedule)
    if not callable(schedule):
        fix = "give a function of the step (from 0), and perhaps the number of steps, that returns a fraction"
        raise RecipeError("the schedule is no function", where="schedule", fix=fix)
    one = len(inspect.signature(schedule).parameters) == 1
    if not one:
        require_accepts(schedule, "schedule", Call(("step", "steps")))
    objects["schedule"] = _AsMultiplier(schedule) if one else schedule
    return {"factory": f"{GIVEN}:schedule"}
