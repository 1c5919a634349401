"""``shardwise budget``: which model to train on how many tokens for FLOPs, hours or tokens, and how."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.common import AsJson, Overrides, RecipeArgument, path_option
from shardwise.cli.spinner import working
from shardwise.core.errors import RecipeError
from shardwise.jobs.request import read_request

if TYPE_CHECKING:
    from shardwise.plugins.scaling.budget import Limit
    from shardwise.plugins.scaling.law import Law
    from shardwise.recipe.noise_scale import NoiseScale
    from shardwise.recipe.sections import Recipe


def command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    flops: Annotated[float | None, typer.Option(help="training FLOPs of the model", min=1)] = None,
    hours: Annotated[float | None, typer.Option(help="hours of the recipe's cluster", min=1e-6)] = None,
    tokens: Annotated[float | None, typer.Option(help="tokens to train on", min=1)] = None,
    law: Annotated[
        str | None,
        typer.Option(
            help="a published law, or a file of shardwise fit; default: the recipe's", metavar="NAME|FILE"
        ),
    ] = None,
    unique_tokens: Annotated[
        float | None,
        typer.Option(help="tokens of the data, which are repeated where more are trained on", min=1),
    ] = None,
    serve_tokens: Annotated[
        float,
        typer.Option(help="tokens to serve later: train a smaller model longer, to the same loss", min=0),
    ] = 0.0,
    noise: Annotated[
        Path | None,
        path_option("a run with evaluation.noise_scale, which advises the batch size", "RUN"),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="show the planned sizes")] = False,
    as_json: AsJson = False,
    html: Annotated[Path | None, path_option("write one HTML page")] = None,
    write: Annotated[Path | None, path_option("write the recipe to train")] = None,
) -> None:
    """Choose model size, tokens and strategy for a budget, with the loss that a scaling law predicts.

    The recipe gives the family of models, data, batch size, cluster and precision. Its model's size and its steps are
    replaced.
    """
    limit = _one_limit(flops, hours, tokens, serve_tokens)
    changes = list(overrides or [])
    if law:
        changes.append(f"law={law}")
    resolved, cluster = read_request(recipe, changes)
    # The request is checked before these modules are imported, which takes much longer.
    from shardwise.core.atomic_file import write_whole
    from shardwise.plugins.scaling.budgeting import find_budget, noise_of_run, to_train
    from shardwise.plugins.scaling.report.budget import BudgetReport, budget_page
    from shardwise.recipe.load import dump_recipe

    recipe_law = _recipe_law(resolved, unique_tokens)
    # Read first, so that a wrong folder costs no planning.
    noise_and_targets = None if noise is None else noise_of_run(noise)
    with working("planning") as progress:
        budget_choice = find_budget(resolved, cluster, limit, recipe_law, serve_tokens, progress)
    trained = to_train(resolved, budget_choice)
    advice = _batch_size_advice(noise_and_targets, trained, budget_choice.plan.step.tokens)
    report = BudgetReport(budget_choice, recipe_law, trained.steps, trained.batch_size, unique_tokens, advice)
    text = report.text(explain)
    print(json.dumps(report.as_dict(), indent=1) if as_json else text)
    if write is not None:
        write_whole(write, dump_recipe(trained).encode("utf-8"))
    if html is not None:
        write_whole(html, budget_page(budget_choice, text, dump_recipe(trained)).encode("utf-8"))


def _batch_size_advice(
    noise_and_targets: tuple[NoiseScale, float] | None, trained: Recipe, step_tokens: float
) -> list[str]:
    """The sentences of a measured noise scale; [] without one. Targets are a share of the tokens of a step."""
    from shardwise.recipe.noise_scale import batch_sentences

    if noise_and_targets is None:
        return []
    measured, target_share = noise_and_targets
    return batch_sentences(measured, trained, target_share * step_tokens)


def _recipe_law(recipe: Recipe, unique_tokens: float | None) -> Law:
    """The recipe's law, on data that is repeated beyond ``unique_tokens``."""
    from shardwise.plugins.scaling.files import read_law
    from shardwise.plugins.scaling.repetition import DataConstrained

    law = read_law(recipe.law)
    return law if unique_tokens is None else DataConstrained(law, unique_tokens)


def _one_limit(flops: float | None, hours: float | None, tokens: float | None, served: float) -> Limit:
    """The one budget of the three. Raises RecipeError for none, several or an infinite one."""
    from shardwise.plugins.scaling.budget import Limit

    seconds = None if hours is None else 3600 * hours
    options = {"flops": flops, "seconds": seconds, "tokens": tokens}
    budgets = {kind: amount for kind, amount in options.items() if amount is not None}
    if len(budgets) != 1:
        verb = "is" if len(budgets) < 2 else "are"
        why = f"{len(budgets) or 'none'} of --flops, --hours and --tokens {verb} given"
        fix = "shardwise budget RECIPE --hours 24"
        raise RecipeError("give one budget", where="command line", why=why, fix=fix)
    ((kind, amount),) = budgets.items()
    if math.isinf(amount + served):
        raise RecipeError("a budget must be finite", where="command line", fix="give a number")
    return Limit(kind, amount)  # type: ignore[arg-type]
