"""``shardwise verify``: compare a strategy with one plain fp32 process, step by step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import AsJson, Overrides, RecipeArgument, run_workers
from shardwise.core.errors import NumericsError
from shardwise.jobs.request import read

if TYPE_CHECKING:
    from shardwise.verify.verify import Verdict


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Train the strategy and a single-process reference on the same data and compare them."""
    asked = read(recipe, overrides or [])
    from shardwise.jobs.verifying import verify

    plan, verdict = verify(*asked, run_workers, steps=steps)
    typer.echo(json.dumps(verdict.as_dict()) if as_json else _table(plan.line, verdict))
    if not verdict.passed:
        raise NumericsError(
            "the strategy does not train as one process does",
            where=plan.line,
            why=f"a relative difference is above {verdict.tolerance:g} (worst parameter: {verdict.worst_parameter})",
            fix="compare with another strategy to see which technique differs, and report it",
        )


def _table(line: str, verdict: Verdict) -> str:
    rows = [
        ("loss", verdict.max_loss_difference),
        ("gradient norm", verdict.max_gradient_norm_difference),
        ("parameters", verdict.max_parameter_difference),
    ]
    lines = [f"{line} against one plain process, {verdict.steps} steps, largest relative difference:"]
    lines += [f"  {name:<14} {value:.2e}" for name, value in rows]
    lines.append(f"  {'passed' if verdict.passed else 'FAILED'} at a tolerance of {verdict.tolerance:g}")
    return "\n".join(lines)
