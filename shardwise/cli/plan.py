"""``shardwise plan``: choose or check a strategy and print what it costs. Needs no accelerator."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.common import AsJson, Overrides, RecipeArgument, make_plan, read, refuse_unfit


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    as_json: AsJson = False,
    top: Annotated[int | None, typer.Option(help="show so many candidates", min=1)] = None,
) -> None:
    """Choose the strategy, or check the pinned one: ledger at the peak, time, neighbours and reasons."""
    plan = make_plan(*read(recipe, overrides))
    if as_json:
        print(plan.to_json())
    else:
        from rich.console import Console

        from shardwise.report.tables import plan_table

        Console().print(plan_table(plan, top))
    refuse_unfit(plan)
