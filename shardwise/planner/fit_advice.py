"""Advice on what to change so that a recipe fits: every remedy predicted, and the one to use.

The remedies and their order are data (technique/fit_advice.py). All are predicted, including those after the first that
fits, so that the user sees what the next one would cost. Pinned settings stay pinned; a try that repeats an earlier
strategy is left out. If no settings fit, the recipe is tried without its pins before its training is changed.

Where the plan itself fits, it is the advice, with a remedy that is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.core.answer import TELLS
from shardwise.core.fit_advice import FitAdvice, RemedyOutcome
from shardwise.core.plan import Plan
from shardwise.core.units import format_bytes, format_change, format_seconds
from shardwise.hardware.cluster import Cluster
from shardwise.planner.remedies import Trials
from shardwise.recipe.sections import Recipe
from shardwise.technique import REMEDIES, UNSHARDED, layout_of


def advise(recipe: Recipe, cluster: Cluster, plan: Plan | None = None) -> FitAdvice:
    """Predict every remedy. Raises the errors of building the recipe's own model.

    Args:
        plan: of the recipe, where it was planned.
    """
    fitting = plan if plan is not None and plan.fits else None
    trials = Trials(recipe, cluster, quick=fitting is not None)
    of_settings = [remedy for remedy in REMEDIES if not remedy.changes_recipe]
    for remedy in of_settings:
        trials.try_remedy(remedy)
    if fitting is None and not any(outcome.fits for outcome in trials.outcomes):
        trials.try_without_pins()
    for remedy in REMEDIES[len(of_settings) :]:
        trials.try_remedy(remedy)
    advised = None if fitting else _advised(trials.outcomes)
    reasons = tuple(_advice_sentences(trials.outcomes, advised, cluster, fitting))
    return FitAdvice(tuple(trials.outcomes), advised, reasons, fitting is not None)


def _advised(outcomes: Sequence[RemedyOutcome]) -> RemedyOutcome | None:
    """The first that fits. If DDP and the next both fit, the next: with one micro-batch it has the same traffic as DDP,
    and its free memory allows a larger micro-batch."""
    fitting = [outcome for outcome in outcomes if outcome.fits]
    if len(fitting) > 1 and fitting[0].remedy is UNSHARDED and fitting[1].remedy is REMEDIES[1]:
        return fitting[1]
    return fitting[0] if fitting else None


def _advice_sentences(
    outcomes: Sequence[RemedyOutcome], advised: RemedyOutcome | None, cluster: Cluster, plan: Plan | None
) -> Iterator[str]:
    first = outcomes[0]
    capacity = format_bytes(cluster.capacity_bytes)
    if first.remedy is UNSHARDED and first.candidate.verdict != "invalid":
        least = {"counted": "", "estimated": "about ", "at least": "at least "}[first.candidate.peak_is]
        needed = (
            f"without sharding a device needs {least}{format_bytes(first.candidate.peak_bytes)} of {capacity}"
        )
        shared = layout_of(first.candidate.strategy, cluster.world_size).data_degree > 1
        if first.fits:
            yield f"{needed}: it fits" + (
                ", so sharding is for a larger micro-batch, not for memory" if shared else ""
            )
        else:
            yield f"{needed}: it does not fit" + (
                ", so model states are sharded, the weights last" if shared else ""
            )
    if plan is not None:
        yield f"the plan fits, with {format_seconds(plan.step.seconds)} a step: use it as it is ({plan.line})"
        yield from _faster(outcomes, plan)
        return
    if advised is None:
        yield "no strategy fits; add devices, shorten data.sequence_length, or unpin strategy settings"
        return
    if advised.unpinned:
        yield advised.in_words
        return
    if advised.remedy.adapter is not None:
        tried = ", ".join(
            dict.fromkeys(outcome.remedy.name for outcome in outcomes[: outcomes.index(advised)])
        )
        yield f"training all weights does not fit with {tried}: train an adapter"
    yield f"use {advised.remedy.name}: {advised.remedy.why}" + (
        f"; {' '.join(advised.overrides)}" if advised.overrides else ""
    )


def _faster(outcomes: Sequence[RemedyOutcome], plan: Plan) -> Iterator[str]:
    """Other optimizers with which all weights are trained in surely less time."""
    for outcome in outcomes:
        change = outcome.candidate.step_seconds / plan.step.seconds - 1
        if outcome.remedy.optimizer and outcome.fits and change < -TELLS:
            yield f"{outcome.remedy.name} fits too, {format_change(change)} step time: {' '.join(outcome.overrides)}"
