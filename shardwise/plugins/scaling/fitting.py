"""Fitting a scaling law to finished runs: one point from the end of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from shardwise.core.errors import DataError
from shardwise.plugins.scaling.fit import TrainedPoint
from shardwise.recipe.sections import Recipe
from shardwise.report.record import RunRecord, read_run

LAST = 0.05
"""Share of a run's steps over which a training loss is averaged."""


def run_points(folders: Sequence[Path]) -> list[TrainedPoint]:
    """Parameters, tokens and final loss of finished runs.

    The loss is the validation loss where all runs have one, else the training loss of the last twentieth of the steps.
    A branch (``checkpoint.start_from``) counts the tokens of the run that it started from.

    Raises:
        DataError: a folder is no run, its run is unfinished, trains an adapter or has no finite loss, or the runs
            have different data.
    """
    runs = [read_run(folder) for folder in folders]
    recipes = [run.settings() for run in runs]
    _refuse_mixtures(runs, recipes)
    held_out = all(run.outcome is not None and run.outcome.held_out_loss is not None for run in runs)
    return [_trained_point(run, held_out) for run in runs]


def _refuse_mixtures(runs: Sequence[RunRecord], recipes: Sequence[Recipe]) -> None:
    for run, recipe in zip(runs, recipes, strict=True):
        if recipe.adapter is not None:
            why = "it trains an adapter, and a law is of training from the start"
            raise DataError("not a run to fit a law to", where=str(run.folder), why=why)
        if recipe.data != recipes[0].data:
            key = next(key for key, value in recipe.data if value != getattr(recipes[0].data, key))
            why = f"data.{key} differs from that of {runs[0].folder}, so their losses do not compare"
            raise DataError("runs of different data", where=str(run.folder), why=why)


def _trained_point(run: RunRecord, held_out: bool) -> TrainedPoint:
    outcome = run.outcome
    if outcome is None:
        fix = "run shardwise train again, which resumes it"
        raise DataError(
            "the run is not finished", where=str(run.folder), why="it has no report.json", fix=fix
        )
    number = max(1, round(LAST * len(run.steps)))
    last = [step for step in run.steps[-number:] if step.tokens]
    loss = outcome.held_out_loss if held_out else None
    if loss is None and last:
        # A loss is a mean over the step's tokens, of which steps may have different numbers.
        loss = sum(step.loss * step.tokens for step in last) / sum(step.tokens for step in last)
    # The fit takes logarithms of all three numbers.
    has_counts = outcome.tokens and run.plan.parameters
    if loss is None or not math.isfinite(loss) or loss <= 0 or not has_counts:
        raise DataError("not a run to fit a law to", where=str(run.folder), why="it has no finite loss")
    return TrainedPoint(float(run.plan.parameters), float(outcome.tokens), loss, run.name)
