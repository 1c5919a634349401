"""Where a plan or a run stands by the recipe's scaling law: tokens per parameter, predicted loss, better sizes."""

from __future__ import annotations

from typing import Any

from shardwise.core.plan import Plan
from shardwise.core.run_files import Outcome
from shardwise.core.units import format_change
from shardwise.plugins.scaling.files import read_law
from shardwise.plugins.scaling.standing import NO_PREDICTION, RunStanding, standing
from shardwise.recipe.sections import Recipe


def standing_of(recipe: Recipe, plan: Plan) -> RunStanding | None:
    """The end of the recipe's run against its law.

    None for a model that starts from trained weights, or adapts them: a law is of training from the start. None for
    samples of a user's dataset, which are no tokens, and for an objective: a law is of the loss of the next token.

    Raises:
        RecipeError: the recipe's law cannot be read.
    """
    tokens = recipe.steps * plan.step.tokens
    if recipe.adapter is not None or recipe.model.hf is not None:
        return None
    if recipe.objective is not None or plan.step.unit != "tokens":
        return None
    if not plan.parameters or not tokens:
        return None
    return standing(read_law(recipe.law), plan.parameters, tokens, recipe.model.vocab)


def standing_values(run_standing: RunStanding) -> dict[str, Any]:
    """The object of ``plan --json``."""
    return {
        "law": run_standing.law,
        "tokens": run_standing.run.tokens,
        "tokens_per_parameter": run_standing.run.tokens_per_parameter,
        "verdict": run_standing.verdict,
        "loss": run_standing.loss,
        "best": {
            "parameters": run_standing.best.parameters,
            "tokens": run_standing.best.tokens,
            "loss": run_standing.best_loss,
        },
        "warnings": list(run_standing.warnings),
    }


def standing_sentences(run_standing: RunStanding, outcome: Outcome | None) -> list[str]:
    """The sentences of a report: the standing, and the loss that was measured at the end."""
    sentences = run_standing.sentences()
    if run_standing.orders <= NO_PREDICTION and outcome is not None and outcome.held_out_loss is not None:
        sentences.append(
            f"measured at the end: a validation loss of {outcome.held_out_loss:.3f},"
            f" {format_change(outcome.held_out_loss / run_standing.loss - 1, 1)} from the law"
        )
    return sentences
