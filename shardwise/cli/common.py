"""What several verbs share: reading the recipe and the cluster, checking rules, making the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.core.cluster import Cluster, cluster_of
from shardwise.core.recipe import Recipe, load_recipe, locate
from shardwise.technique import SETTINGS, refuse_broken, refuse_unsupported

if TYPE_CHECKING:
    from shardwise.core.ladder import Ladder
    from shardwise.core.plan import Plan

RecipeArgument = Annotated[Path, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, over the recipe's", metavar="KEY=VALUE")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def read(recipe_file: Path, overrides: list[str] | None) -> tuple[Recipe, Cluster]:
    """The checked recipe and its cluster; everything that can be refused without torch is refused here."""
    recipe = load_recipe(recipe_file, overrides or [], SETTINGS)
    cluster = cluster_of(recipe.cluster)

    def where(key: str) -> str:
        return locate(recipe_file, overrides or [], ("strategy", key))

    refuse_broken(recipe, cluster.world_size, where)
    refuse_unsupported(recipe.strategy, cluster.device, where)
    return recipe, cluster


def make_plan(recipe: Recipe, cluster: Cluster, *, compare: bool = False) -> Plan:
    """Plan; loads torch. Without ``compare``, what trains waits for nothing but its own strategy."""
    from shardwise.model.blueprint import blueprint_of
    from shardwise.plan.search import plan_for

    return plan_for(recipe, blueprint_of(recipe), cluster, compare=compare)


def refuse_unfit(plan: Plan, ladder: Ladder | None = None) -> None:
    """Raise ResourceError when the plan needs more than a device has; with what a ladder advises, or where to ask."""
    from shardwise.core.errors import ResourceError
    from shardwise.core.units import format_bytes

    if not plan.fits:
        lost = plan.peak.ledger.fragmentation
        pieces = plan.peak.bytes - lost <= plan.capacity_bytes - plan.reserve_bytes
        raise ResourceError(
            "does not fit",
            where=plan.line,
            why=f"rank {plan.worst_rank} needs {format_bytes(plan.peak.bytes)} of"
            f" {format_bytes(plan.capacity_bytes)}, most in the {plan.peak.phase} phase"
            + (f", {format_bytes(lost)} of it lost to fragmentation" if pieces else ""),
            fix=("set PYTORCH_ALLOC_CONF=expandable_segments:True, or " if pieces else "") + _way_out(ladder),
        )


def _way_out(ladder: Ladder | None) -> str:
    if ladder is None:
        return "see what would: shardwise plan RECIPE --explain"
    if ladder.advised is None:
        return "use more devices, a shorter data.sequence_length, or pin less of the strategy"
    overrides = " ".join(ladder.advised.overrides)
    return f"take {ladder.advised.rung.name}: {overrides}" if overrides else "pin less of the strategy"
