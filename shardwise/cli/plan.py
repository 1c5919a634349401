"""``shardwise plan``: choose or check a strategy and print what it costs. Needs no accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import AsJson, Overrides, RecipeArgument, make_plan, read, refuse_unfit


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: AsJson = False,
    top: Annotated[int | None, typer.Option(help="show so many candidates", min=1)] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="show what would fit, from more sharding to adapters, and why")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="write the plan as one HTML page", metavar="FILE")] = None,
) -> None:
    """Choose the strategy, or check the pinned one: ledger at the peak, time, neighbours and reasons.

    What does not fit is explained without being asked.
    """
    asked, cluster = read(recipe, overrides)
    plan = make_plan(asked, cluster, compare=True)
    from shardwise.plan.ladder import climb  # loads torch

    ladder = climb(asked, cluster) if explain or not plan.fits else None
    if as_json:
        print(json.dumps(plan.as_dict() | ({"ladder": ladder.as_dict()} if ladder else {}), indent=1))
    else:
        from rich.console import Console

        from shardwise.report.ladder import ladder_table
        from shardwise.report.tables import plan_table

        Console().print(plan_table(plan, top))
        if ladder is not None:
            Console().print(ladder_table(ladder))
    if html is not None:
        from shardwise.core.recipe import dump_recipe
        from shardwise.report.run import write_plan_page

        write_plan_page(plan, dump_recipe(asked), html)
    refuse_unfit(plan, ladder)
