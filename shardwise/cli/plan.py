"""``shardwise plan``: choose or check a strategy and print what it costs. Needs no accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.common import AsJson, Overrides, RecipeArgument
from shardwise.jobs.request import read


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: AsJson = False,
    top: Annotated[int | None, typer.Option(help="show N candidates", min=1)] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="show which remedies fit, from more sharding to LoRA, and why")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="write the plan as one HTML page", metavar="FILE")] = None,
) -> None:
    """Choose the strategy, or check the pinned one: ledger at the peak, time, neighbours and reasons.

    A plan that does not fit is explained without --explain.
    """
    asked, cluster = read(recipe, overrides or [])
    from shardwise.jobs.planning import make_plan, refuse_unfit

    plan = make_plan(asked, cluster, compare=True)
    from shardwise.plan.fit_advice import advise  # loads torch

    advice = advise(asked, cluster) if explain or not plan.fits else None
    if as_json:
        print(json.dumps(plan.as_dict() | ({"ladder": advice.as_dict()} if advice else {}), indent=1))
    else:
        from rich.console import Console

        from shardwise.report.fit_advice import advice_table
        from shardwise.report.tables import plan_table

        Console().print(plan_table(plan, top))
        if advice is not None:
            Console().print(advice_table(advice))
    if html is not None:
        from shardwise.recipe.load import dump_recipe
        from shardwise.report.run import write_plan_page

        write_plan_page(plan, dump_recipe(asked), html)
    refuse_unfit(plan, advice)
