"""Plans that cost less: without neighbours, and with dry runs that are made once per test process.

A dry run is a function of frozen values: the recipe, the strategy, the kind and number of devices, the rank, the depth.
The memory of the devices and what the recipe pins are not among them: they limit a plan, not a step.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

from shardwise.core.plan import Plan
from shardwise.core.strategy import Strategy
from shardwise.dryrun import run as running
from shardwise.dryrun.run import DryRun
from shardwise.hardware.allocator_options import VARIABLES
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint
from shardwise.planner import counts, predict, search
from shardwise.recipe.load import Recipe

_OF_PLANS: Any = {"cluster": {"memory_gib", "host_memory_gib"}, "strategy": True, "plan": True}

_made: dict[tuple[Any, ...], DryRun] = {}
_dry_run = running.dry_run


def dry_run(
    recipe: Recipe, blueprint: Blueprint, strategy: Strategy, cluster: Cluster, **options: Any
) -> DryRun:
    """As `shardwise.dryrun.run.dry_run`, which is called the first time that it is asked for this."""
    if recipe.model.factory is not None or recipe.model.hf is not None:  # what they name may change
        return _dry_run(recipe, blueprint, strategy, cluster, **options)
    key = (
        type(blueprint),
        recipe.model_dump_json(exclude=_OF_PLANS),
        strategy,
        (cluster.device.name, cluster.nodes, cluster.devices_per_node),
        _whole(options),
        tuple(os.environ.get(name) for name in VARIABLES),
    )
    if key not in _made:
        _made[key] = _dry_run(recipe, blueprint, strategy, cluster, **options)
    return _made[key]


def _whole(options: dict[str, Any]) -> tuple[Any, ...]:
    """The options with their defaults."""
    parameters = inspect.signature(_dry_run).parameters.values()
    return tuple(options.get(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY)


@pytest.fixture
def remembered_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans use them too."""
    for module in (predict, counts):
        monkeypatch.setattr(module, "dry_run", dry_run)


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``shardwise plan`` predict the chosen strategy alone: its neighbours take most of the time."""
    plan_for = search.plan_for

    def alone(*arguments: Any, compare: bool = False, **options: Any) -> Plan:
        return plan_for(*arguments, compare=False, **options)

    monkeypatch.setattr(search, "plan_for", alone)
