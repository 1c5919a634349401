"""The one table of the plugins: what the packages of ``shardwise/plugins`` add, by the names that users write.

The core calls a plugin only through ``plugin``, and does without it where its package is removed.

Plugins also add to the work of the core:

    calibration     a first plan measures this machine, and ``shardwise doctor --calibrate``
    compare         ``shardwise report`` of several runs
    fewest_devices  ``shardwise plan --for devices``
    gguf            ``shardwise export --gguf``
    importers       ``shardwise plan`` reads files of other trainers
    scaling         a plan and a report compare the run with scaling laws
    serve           samples at the end of a run, and ``shardwise plan --serve``
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from shardwise.core.errors import RecipeError

VERBS: dict[str, str] = {
    "budget": "scaling.commands.budget",
    "chat": "serve.commands.chat",
    "doctor": "doctor.command",
    "eval": "serve.commands.eval",
    "explain": "explain.command",
    "explore": "explorer.command",
    "finetune": "finetune.command",
    "fit": "scaling.commands.fit",
    "from": "importers.command",
    "generate": "serve.commands.generate",
    "init": "finetune.init",
    "launch": "schedulers.command",
    "merge": "merge.command",
    "quantize": "quantize.command",
    "watch": "live.command",
}
"""Modules of verbs of the command line; each has a function ``command``."""

PUBLIC: dict[str, str] = {
    "Perplexity": "serve.evaluating",
    "Piece": "serve.serving",
    "Quantized": "quantize.report",
    "Request": "serve.requests",
    "Sampling": "serve.sampling",
    "ServedModel": "serve.serving",
    "evaluate_text": "serve.evaluating",
    "evaluate_tasks": "serve.evaluating",
    "load_model": "serve.serving",
    "quantize": "quantize.api",
}
"""Modules of public names of ``import shardwise``."""

TRACKERS: dict[str, str] = {
    "csv": "trackers.csv_tracker",
    "mlflow": "trackers.mlflow_tracker",
    "tensorboard": "trackers.tensorboard_tracker",
    "trackio": "trackers.trackio_tracker",
    "wandb": "trackers.wandb_tracker",
}
"""Modules of the recipe's ``trackers``; each has a function ``open_tracker``."""


SCHEDULES: dict[str, str] = {"pipedream": "pipeline.pipedream"}
"""Modules of values of ``pipeline_schedule``; each has a function ``passes_of`` of (live model, update, pipeline)."""


OBJECTIVES: dict[str, str] = {
    **{n: f"preferences.{n}" for n in ("dpo", "ipo", "orpo", "simpo", "cpo", "kto", "reward")},
    "grpo": "rollouts.grpo",
    "rloo": "rollouts.grpo",
    "ppo": "rollouts.ppo",
}
"""Modules of named objectives (the recipe's ``objective``); each has a function ``objective`` of the recipe."""


CHECKPOINTING: dict[str, str] = {
    "recursive": "checkpointing.recursive",
    "sqrt": "checkpointing.sqrt",
}
"""Modules of values of ``activation_checkpointing``, before the colon; each has a function ``wrapped`` of all blocks of
a stage and the number after the colon. A value exists where its plugin is installed."""


def installed(name: str) -> bool:
    """Whether the package of the plugin ``NAME`` or ``NAME.MODULE`` is there; imports nothing of it."""
    try:
        return find_spec(f"shardwise.plugins.{name.partition('.')[0]}") is not None
    except ModuleNotFoundError:  # shardwise.plugins is not
        return False


def plugin(name: str) -> ModuleType | None:
    """The module ``shardwise.plugins.NAME``; None where its package is not installed."""
    return import_module(f"shardwise.plugins.{name}") if installed(name) else None


def require_plugin(name: str, where: str) -> ModuleType:
    """The module ``shardwise.plugins.NAME``.

    Args:
        where: what the user asked for that needs it.

    Raises:
        RecipeError: its package is not installed.
    """
    module = plugin(name)
    if module is None:
        package = name.partition(".")[0]
        fix = "install all of shardwise"
        raise RecipeError(f"shardwise.plugins.{package} is not installed", where=where, fix=fix)
    return module
