"""Shardwise trains models that do not fit: it plans the strategy that fits, says why, and trains exactly that.

The public interface is small. Names are loaded when first used, so that ``import shardwise`` costs nothing:

    recipe = shardwise.load("recipe.yaml")
    plan = shardwise.plan(recipe)
    shardwise.train(recipe, plan, "runs/one")
    verdict = shardwise.verify(recipe, plan, steps=20)
    record = shardwise.fit(module, loss, dataset, out="runs/own", steps=1000, batch_size=64)
    record.load_into(module)
    with shardwise.session(recipe) as run: ...
    found = shardwise.evaluate("runs/one", "data/test.txt")
    model = shardwise.load_model("runs/one", {"name": "runs/two/adapter"})
    texts = model.complete([shardwise.Request("def ", "name")])
    small = shardwise.quantize("runs/one", "models/one-4bit", scheme="w4a16-g128", method="gptq")
"""
# ruff: noqa: F403, F405 - type checkers read the public names from api.py

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api import *
    from shardwise.extras.quantize.api import quantize as quantize
    from shardwise.extras.serve.evaluating import Perplexity as Perplexity
    from shardwise.extras.serve.evaluating import evaluate as evaluate
    from shardwise.extras.serve.evaluating import evaluate_tasks as evaluate_tasks
    from shardwise.extras.serve.requests import Request as Request
    from shardwise.extras.serve.sampling import Sampling as Sampling
    from shardwise.extras.serve.serving import Piece as Piece
    from shardwise.extras.serve.serving import ServedModel as ServedModel
    from shardwise.extras.serve.serving import load_model as load_model

__all__ = [
    "Callback",
    "Cluster",
    "Perplexity",
    "Piece",
    "Plan",
    "Recipe",
    "Request",
    "Sampling",
    "ServedModel",
    "Session",
    "evaluate",
    "evaluate_tasks",
    "export",
    "fit",
    "load",
    "load_into",
    "load_model",
    "merge",
    "plan",
    "quantize",
    "session",
    "spawn",
    "train",
    "verify",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in __all__:
        from shardwise import api
        from shardwise.core.extras import PUBLIC, require_extra

        module = require_extra(PUBLIC[name], f"shardwise.{name}") if name in PUBLIC else api
        return getattr(module, name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


# ``plan``, ``train``, ``verify``, ``export`` and ``quantize`` are subpackages and public functions. When Python imports
# a subpackage it sets the module as an attribute of this package, which would hide the function. So these modules are
# callable.


class _ByName(ModuleType):
    """A module that is pickled by its name, as plain modules are by cloudpickle: a user's function refers to it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)


class _CallableModule(_ByName):
    """A subpackage that calls the public function of its name: ``shardwise.plan(recipe)``.

    ``help()`` and the tooltips of notebooks show that function.
    """

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        import inspect

        function, name = self._function(), self.__name__.rpartition(".")[2]
        return f"{name}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"

    @property
    def __signature__(self) -> object:
        import inspect

        return inspect.signature(self._function())

    def _function(self) -> Any:
        return __getattr__(self.__name__.rpartition(".")[2])

    def __call__(self, *arguments: object, **options: object) -> object:
        return self._function()(*arguments, **options)


class _Package(_ByName):
    """Makes a subpackage with the name of a public function callable when it is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
