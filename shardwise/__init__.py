"""Shardwise trains models that do not fit: it plans the strategy that fits, says why, and trains exactly that.

The public interface is small. Names are loaded when first used, so that ``import shardwise`` costs nothing:

    recipe = shardwise.load("recipe.yaml")
    plan = shardwise.plan(recipe)
    shardwise.train(recipe, plan, "runs/one")
    verdict = shardwise.verify(recipe, plan, steps=20)
    record = shardwise.train_module(module, loss, dataset, out="runs/own", steps=1000, batch_size=64)
    record.load_into(module)
    with shardwise.session(recipe) as run: ...
    perplexity = shardwise.evaluate_text("runs/one", "data/test.txt")
    model = shardwise.load_model("runs/one", {"name": "runs/two/adapter"})
    texts = model.complete([shardwise.Request("def ", "name")])
    small = shardwise.quantize("runs/one", "models/one-4bit", scheme="w4a16-g128", method="gptq")
"""
# ruff: noqa: F403, F405 - type checkers read the public names from api.py

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.api import *
    from shardwise.plugins.quantize.api import quantize as quantize
    from shardwise.plugins.quantize.report import Quantized as Quantized
    from shardwise.plugins.serve.evaluating import Perplexity as Perplexity
    from shardwise.plugins.serve.evaluating import evaluate_tasks as evaluate_tasks
    from shardwise.plugins.serve.evaluating import evaluate_text as evaluate_text
    from shardwise.plugins.serve.requests import Request as Request
    from shardwise.plugins.serve.sampling import Sampling as Sampling
    from shardwise.plugins.serve.serving import Piece as Piece
    from shardwise.plugins.serve.serving import ServedModel as ServedModel
    from shardwise.plugins.serve.serving import load_model as load_model

__all__ = [
    "Callback",
    "CheckpointError",
    "Cluster",
    "DataError",
    "NumericsError",
    "Perplexity",
    "Piece",
    "Plan",
    "Preempted",
    "Quantized",
    "RankError",
    "Recipe",
    "RecipeError",
    "Request",
    "ResourceError",
    "RunRecord",
    "Sampling",
    "ServedModel",
    "Session",
    "ShardwiseError",
    "TrainedRun",
    "Verdict",
    "evaluate_tasks",
    "evaluate_text",
    "export",
    "load",
    "load_into",
    "load_model",
    "merge",
    "plan",
    "quantize",
    "session",
    "spawn",
    "train",
    "train_module",
    "verify",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in __all__:
        from shardwise import api
        from shardwise.core.plugins import PUBLIC, require_plugin

        module = require_plugin(PUBLIC[name], f"shardwise.{name}") if name in PUBLIC else api
        return getattr(module, name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
