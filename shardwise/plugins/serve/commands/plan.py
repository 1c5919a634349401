"""``shardwise plan --serve``: what generating from the model takes."""

from __future__ import annotations

import json
from pathlib import Path


def show(
    path: Path, overrides: list[str], sizes: tuple[str, int | None, int | None, int], as_json: bool
) -> None:
    """Print the plan. Raises ResourceError where it does not fit.

    Args:
        sizes: precision, tokens of context and of the prompt, and requests at once.
    """
    from shardwise.plugins.serve.planning import plan_serving, refuse_unfit_serving, served_recipe

    recipe, cluster = served_recipe(path, overrides)
    precision, context, prompt, batch = sizes
    plan = plan_serving(recipe, cluster, precision=precision, context=context, prompt=prompt, batch=batch)
    if as_json:
        print(json.dumps(plan.as_dict(), indent=1))
    else:
        from rich.console import Console

        from shardwise.plugins.serve.commands.serving_table import serving_table

        Console().print(serving_table(plan))
    refuse_unfit_serving(plan)
