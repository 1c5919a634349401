"""Predictions of the remedies for a recipe that does not fit, and of the same recipe without its pins.

All have the largest micro-batch that fits. They are confirmed by full dry runs until one fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from shardwise.core.errors import RecipeError
from shardwise.core.fit_advice import Remedy, RemedyOutcome
from shardwise.core.plan import Candidate
from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import Cluster
from shardwise.model.open import blueprint_of
from shardwise.planner.predictor import Predictor
from shardwise.recipe.sections import AdapterSpec, OptimizerSpec, Recipe
from shardwise.technique import (
    DIGITS,
    MICRO_BATCH_SIZE,
    REMEDIES,
    UNSHARDED,
    broken_rules,
    candidates_of,
    case_of,
    setting_of,
    strategy_from,
)

SETTING_TRIES = [values for remedy in REMEDIES if not remedy.changes_recipe for values in remedy.tries]
"""What remedies of settings set, in an order of less and less memory."""

MOST_VALUES = 4
"""Values of a dropped pin that are tried, where no remedy sets it."""

CONFIRMED = 3
"""Micro-batches of a strategy that are dry-run in full, until one fits."""


@dataclass
class Trials:
    """The remedies that were tried on one recipe.

    Attributes:
        quick: whether no prediction is confirmed by a full dry run.
    """

    recipe: Recipe
    cluster: Cluster
    quick: bool = False
    outcomes: list[RemedyOutcome] = field(default_factory=list)

    def try_remedy(self, remedy: Remedy) -> None:
        """Predict its tries up to the first that fits, where the recipe has what the remedy changes."""
        asked = _changed(self.recipe, remedy)
        if asked is None:
            return
        predictor = self._predictor if asked is self.recipe else self._predictor_of(asked)
        sections = tuple(_section_overrides(self.recipe, asked))
        known = set[Strategy]()
        if asked is self.recipe and remedy is not UNSHARDED:
            known = {outcome.candidate.strategy for outcome in self.outcomes}
        confirm = not self.quick and not any(outcome.fits for outcome in self.outcomes)
        for values in remedy.tries:
            strategy = _possible(predictor, values)
            if strategy in known:
                continue
            candidate = _largest_that_fits(predictor, strategy, confirm)
            known |= {strategy, candidate.strategy}
            overrides = (*sections, *_setting_overrides(asked, values, strategy))
            self.outcomes.append(RemedyOutcome(remedy, overrides, candidate))
            if candidate.verdict == "fits":
                return

    def try_without_pins(self) -> None:
        """Add the recipe without each pin that keeps it from fitting; without all of them if no single one does."""
        pins = [key for key in self.recipe.strategy if key not in DIGITS]
        alone = [outcome for key in pins if (outcome := self._without((key,))) is not None]
        if alone:
            self.outcomes += alone
        elif len(pins) > 1 and (outcome := self._without(tuple(pins))) is not None:
            self.outcomes.append(outcome)

    def _without(self, pins: tuple[str, ...]) -> RemedyOutcome | None:
        """The first settings that fit without some pins, of settings that need less and less memory."""
        kept = {key: value for key, value in self.recipe.strategy.items() if key not in pins}
        predictor = self._predictor_of(self.recipe.model_copy(update={"strategy": kept}))
        for other in self._other_values(predictor, pins):
            tries = [_possible(predictor, {**values, **other}) for values in SETTING_TRIES]
            fits = partial(_fits_quickly, predictor)
            for strategy in tries[bisect_left(tries, True, key=fits) :]:
                candidate = _largest_that_fits(predictor, strategy, confirm=True)
                if candidate.verdict == "fits":
                    remedy = Remedy(f"unpinned {', '.join(pins)}", "the recipe pins it", ())
                    overrides = tuple(f"strategy.{key}=null" for key in pins)
                    return RemedyOutcome(remedy, overrides, candidate, pins)
        return None

    def _other_values(self, predictor: Predictor, pins: Sequence[str]) -> Iterator[Mapping[str, object]]:
        """Values of a single pin that no remedy sets; nothing in particular for others."""
        setting = setting_of(pins[0])
        if len(pins) > 1 or setting.key in SETTING_TRIES[0] or setting is MICRO_BATCH_SIZE:
            yield {}
            return
        listed = (setting.default, *_candidates(predictor, setting.key), *setting.last_resort)
        others = [value for value in dict.fromkeys(listed) if value != self.recipe.strategy[setting.key]]
        yield from ({setting.key: value} for value in others[:MOST_VALUES])

    @cached_property
    def _predictor(self) -> Predictor:
        return self._predictor_of(self.recipe)

    def _predictor_of(self, asked: Recipe) -> Predictor:
        return Predictor(asked, blueprint_of(asked), self.cluster)


def _candidates(predictor: Predictor, key: str, strategy: Strategy | None = None) -> Sequence[object]:
    """Values that the planner may choose for a setting of a strategy; of the pinned one by default."""
    recipe, cluster = predictor.recipe, predictor.cluster
    strategy = strategy or strategy_from(recipe.strategy)
    case = case_of(strategy, cluster.world_size, recipe, cluster.devices_per_node)
    return candidates_of(setting_of(key), case)


def _possible(predictor: Predictor, values: Mapping[str, object]) -> Strategy:
    """The strategy with these values and the recipe's pins.

    A value that these devices have no candidate for, such as a stage of ZeRO on a single one, becomes the candidate
    that needs the least memory.
    """
    pinned = predictor.recipe.strategy
    strategy = strategy_from({**values, **pinned})
    for key in SETTING_TRIES[0]:
        if key not in pinned and (candidates := _candidates(predictor, key, strategy)):
            value = strategy.values[key]
            strategy = strategy.with_values(**{key: value if value in candidates else candidates[-1]})
    return strategy


def _setting_overrides(asked: Recipe, values: Mapping[str, object], strategy: Strategy) -> Iterator[str]:
    """The overrides of the settings that a try sets."""
    defaults = strategy_from({})
    for key in values:
        if key not in asked.strategy and strategy.values[key] != defaults.values[key]:
            yield f"strategy.{key}={strategy.values[key]}"


def _largest_that_fits(predictor: Predictor, strategy: Strategy, confirm: bool) -> Candidate:
    """The strategy with the largest micro-batch that fits, else with the smallest.

    One that breaks a rule, or cannot be built here, is invalid with that reason.
    """
    for violation in broken_rules(strategy, predictor.cluster.world_size, predictor.recipe):
        return Candidate(strategy, "", 0, 0.0, "invalid", f"{violation.rule.key}: {violation.rule.reason}")
    sizes = predictor.micro_batch_sizes(strategy)
    trials = [strategy.with_values(**{MICRO_BATCH_SIZE.key: size}) for size in sizes]
    try:
        if not predictor.may_fit(trials[-1]):
            return predictor.candidates[trials[-1]]
        fits = partial(_fits_quickly, predictor)
        first = min(bisect_left(trials, True, key=fits), len(trials) - 1)
        trial = trials[first]
        if fits(trial) and confirm:
            for trial in trials[first : first + CONFIRMED]:
                predictor.confirm(trial)
                if predictor.candidates[trial].verdict == "fits":
                    break  # fragmentation may need what the largest micro-batch leaves
        return predictor.candidates[trial]
    except RecipeError as error:
        return Candidate(strategy, "", 0, 0.0, "invalid", error.what)


def _fits_quickly(predictor: Predictor, trial: Strategy) -> bool:
    if not predictor.may_fit(trial):
        return False
    predictor.estimate(trial, alone=True)
    return predictor.candidates[trial].verdict == "fits"


def _changed(recipe: Recipe, remedy: Remedy) -> Recipe | None:
    """The recipe with the remedy's adapter or optimizer; None if it trains few weights, or with another optimizer."""
    if remedy.adapter is not None:
        adapter = (recipe.adapter or AdapterSpec()).model_copy(update=dict(remedy.adapter))
        return recipe.model_copy(update={"adapter": adapter})
    if remedy.optimizer is None:
        return recipe
    plain = recipe.optimizer.name == OptimizerSpec().name and recipe.optimizer.factory is None
    if recipe.adapter is not None or not plain:
        return None
    optimizer = recipe.optimizer.model_copy(update=dict(remedy.optimizer))
    return recipe.model_copy(update={"optimizer": optimizer})


def _section_overrides(recipe: Recipe, asked: Recipe) -> Iterator[str]:
    """The overrides of an adapter and of an optimizer on the command line."""
    if asked.adapter is not None:
        before = recipe.adapter.model_dump() if recipe.adapter else {"quantize": "none"}
        after = asked.adapter.model_dump()
        shown = ("name", "rank", "quantize")
        yield from (f"adapter.{key}={after[key]}" for key in shown if after[key] != before.get(key))
    if asked.optimizer.name != recipe.optimizer.name:
        yield f"optimizer.name={asked.optimizer.name}"
