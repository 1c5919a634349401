"""Shardwise trains models that do not fit: it plans the strategy that fits, says why, and trains exactly that.

The public interface is small. Names are loaded when first used, so that ``import shardwise`` costs nothing:

    recipe = shardwise.load("recipe.yaml")
    plan = shardwise.plan(recipe)
    shardwise.train(recipe, plan, "runs/one")
    verdict = shardwise.verify(recipe, plan, steps=20)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.api import Cluster, Plan, Recipe, load, plan, train, verify

__all__ = ["Cluster", "Plan", "Recipe", "load", "plan", "train", "verify"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in __all__:
        from shardwise import api

        return getattr(api, name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


class _Package(ModuleType):
    """``plan`` and ``train`` are functions for users and subpackages inside: the functions win.

    Importing a subpackage sets it as an attribute of its parent; here that has no effect, and
    ``from shardwise.plan.search import ...`` finds it all the same.
    """

    @property
    def plan(self) -> object:
        return __getattr__("plan")

    @plan.setter
    def plan(self, module: object) -> None: ...

    @property
    def train(self) -> object:
        return __getattr__("train")

    @train.setter
    def train(self, module: object) -> None: ...


sys.modules[__name__].__class__ = _Package
