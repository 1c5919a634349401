"""What several verbs share: reading the recipe and the cluster, checking rules, making the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.core.cluster import PROFILES, Cluster, cluster_of
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
    """Raise ResourceError when the plan needs more than there is; with what a ladder advises, or where to ask."""
    from shardwise.core.errors import ResourceError

    if not plan.fits:
        raise ResourceError(
            "does not fit",
            where=plan.line,
            why=" and ".join(_too_much(plan)),
            fix=_allocator_hint(plan) + _way_out(ladder),
        )


def _too_much(plan: Plan) -> Iterator[str]:
    """What is needed of what there is: of a device's memory, of the host's."""
    from shardwise.core.units import format_bytes

    if plan.peak.bytes > plan.capacity_bytes - plan.reserve_bytes:
        beside = f" beside a reserve of {format_bytes(plan.reserve_bytes)}" if plan.reserve_bytes else ""
        lost = format_bytes(plan.peak.ledger.fragmentation)
        yield (
            f"rank {plan.worst_rank} needs {format_bytes(plan.peak.bytes)} of"
            f" {format_bytes(plan.capacity_bytes)}{beside}, most in the {plan.peak.phase} phase"
            + (f", {lost} of it lost to fragmentation" if _in_pieces(plan) else "")
        )
    if plan.host.total > plan.host_capacity_bytes:
        yield (
            f"a rank needs {format_bytes(plan.host.total)} of {format_bytes(plan.host_capacity_bytes)} of host memory"
        )


def _in_pieces(plan: Plan) -> bool:
    """Whether the device has room, but in pieces that are too small."""
    room = plan.capacity_bytes - plan.reserve_bytes
    return plan.peak.bytes - plan.peak.ledger.fragmentation <= room < plan.peak.bytes


def _allocator_hint(plan: Plan) -> str:
    """What may leave fewer pieces, where the run would not ask for it by itself; else ""."""
    from shardwise.core.allocator_options import VARIABLES, options_in

    kind = PROFILES[plan.device].kind if plan.device in PROFILES else "cpu"
    if not _in_pieces(plan) or options_in(kind).expandable_segments:
        return ""
    return f"set {VARIABLES[0]}=expandable_segments:True, or "


def _way_out(ladder: Ladder | None) -> str:
    if ladder is None:
        return "see what would: shardwise plan RECIPE --explain"
    if ladder.advised is None:
        return "use more devices, a shorter data.sequence_length, or pin less of the strategy"
    overrides = " ".join(ladder.advised.overrides)
    return f"take {ladder.advised.rung.name}: {overrides}" if overrides else "pin less of the strategy"
