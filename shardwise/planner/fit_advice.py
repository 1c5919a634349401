"""Advice on what to change so that a recipe fits: every remedy predicted, and the one to use.

The remedies and their order are data (technique/fit_advice.py). All are predicted, including those after the first that
fits, so that the user sees what the next one would cost. Predictions use the largest micro-batch that fits. Up to the
advised remedy they are confirmed by full dry runs with fragmentation; later ones are quick.

A remedy changes the strategy, and some also the recipe's adapter. Pinned settings stay pinned; a try that repeats an
earlier strategy is left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from shardwise.core.errors import RecipeError
from shardwise.core.fit_advice import FitAdvice, Remedy, RemedyOutcome
from shardwise.core.plan import Candidate
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes
from shardwise.hardware.cluster import Cluster
from shardwise.model.open import blueprint_of
from shardwise.planner.predictor import Predictor
from shardwise.recipe.sections import AdapterSpec, Recipe
from shardwise.technique import REMEDIES, UNSHARDED, broken_rules, strategy_from


def advise(recipe: Recipe, cluster: Cluster) -> FitAdvice:
    """Predict every remedy. Raises the errors of building the recipe's own model."""
    outcomes: list[RemedyOutcome] = []
    seen: set[tuple[AdapterSpec | None, Strategy]] = set()
    predictors: dict[AdapterSpec | None, Predictor] = {}
    for remedy in REMEDIES:
        asked = _with_adapter(recipe, remedy)
        if asked.adapter not in predictors:
            predictors[asked.adapter] = Predictor(asked, blueprint_of(asked), cluster)
        for values in remedy.tries:
            strategy = strategy_from({**values, **recipe.strategy})
            if (asked.adapter, strategy) in seen:
                continue
            seen.add((asked.adapter, strategy))
            settled = any(outcome.fits and outcome.remedy is not UNSHARDED for outcome in outcomes)
            candidate = _candidate(predictors[asked.adapter], strategy, quick=settled)
            outcomes.append(RemedyOutcome(remedy, _overrides(recipe, asked, values), candidate))
            if outcomes[-1].fits:
                break
    advised = _advised(outcomes)
    return FitAdvice(tuple(outcomes), advised, tuple(_reasons(outcomes, advised, cluster)))


def _with_adapter(recipe: Recipe, remedy: Remedy) -> Recipe:
    if remedy.adapter is None:
        return recipe
    given = recipe.adapter or AdapterSpec()
    return recipe.model_copy(update={"adapter": given.model_copy(update=dict(remedy.adapter))})


def _candidate(predictor: Predictor, strategy: Strategy, quick: bool) -> Candidate:
    """The strategy as predicted: quickly, and unless ``quick`` confirmed by a full dry run if it fits.

    A strategy that breaks a rule, or cannot be built here, is invalid with that reason.
    """
    for violation in broken_rules(strategy, predictor.cluster.world_size, predictor.recipe):
        return Candidate(strategy, "", 0, 0.0, "invalid", f"{violation.rule.key}: {violation.rule.reason}")
    try:
        found = _largest_that_fits(predictor, strategy)
        if quick or found.verdict != "fits":
            return found
        predictor.predict(found.strategy, quick=False)
        return predictor.candidates[found.strategy]
    except RecipeError as error:
        return Candidate(strategy, "", 0, 0.0, "invalid", error.what)


def _largest_that_fits(predictor: Predictor, strategy: Strategy) -> Candidate:
    """The strategy with the largest micro-batch that fits by quick predictions, else with the smallest."""
    trials = [strategy.with_values(micro_batch_size=size) for size in predictor.micro_batch_sizes(strategy)]
    if not predictor.may_fit(trials[-1]):
        return predictor.candidates[trials[-1]]

    def fits(trial: Strategy) -> bool:
        predictor.predict(trial, quick=True)
        return predictor.candidates[trial].verdict == "fits"

    index = min(bisect_left(trials, True, key=fits), len(trials) - 1)
    fits(trials[index])
    return predictor.candidates[trials[index]]


def _overrides(recipe: Recipe, asked: Recipe, values: Mapping[str, object]) -> tuple[str, ...]:
    """The overrides of a try on the command line."""
    adapter: list[str] = []
    if asked.adapter is not None:
        before = recipe.adapter.model_dump() if recipe.adapter else {"quantize": "none"}
        after = asked.adapter.model_dump()
        shown = ("name", "rank", "quantize")
        adapter = [f"adapter.{key}={after[key]}" for key in shown if after[key] != before.get(key)]
    defaults = strategy_from({})
    free = {key: value for key, value in values.items() if key not in recipe.strategy}
    changed = [f"strategy.{key}={value}" for key, value in free.items() if value != defaults.values[key]]
    return (*adapter, *changed)


def _advised(outcomes: list[RemedyOutcome]) -> RemedyOutcome | None:
    """The first that fits. If DDP and the next both fit, the next: with one micro-batch it has the same traffic as DDP,
    and its free memory allows a larger micro-batch."""
    fitting = [outcome for outcome in outcomes if outcome.fits]
    if len(fitting) > 1 and fitting[0].remedy is UNSHARDED and fitting[1] is outcomes[1]:
        return fitting[1]
    return fitting[0] if fitting else None


def _reasons(outcomes: list[RemedyOutcome], advised: RemedyOutcome | None, cluster: Cluster) -> Iterator[str]:
    first, capacity = outcomes[0], format_bytes(cluster.capacity_bytes)
    if first.remedy is UNSHARDED and first.candidate.verdict != "invalid":
        least = {"counted": "", "estimated": "about ", "at least": "at least "}[first.candidate.peak_is]
        needed = (
            f"without sharding a device needs {least}{format_bytes(first.candidate.peak_bytes)} of {capacity}"
        )
        if first.fits:
            yield f"{needed}: it fits, so sharding is for a larger micro-batch, not for memory"
        else:
            yield f"{needed}: it does not fit, so model states are sharded, the weights last"
    if advised is None:
        yield "no strategy fits; add devices, shorten data.sequence_length, or unpin strategy settings"
        return
    if advised.remedy.adapter is not None:
        yield "training all weights does not fit with sharding, checkpointing and CPU offload: train an adapter"
    yield f"use {advised.remedy.name}: {advised.remedy.why}" + (
        f"; {' '.join(advised.overrides)}" if advised.overrides else ""
    )
