"""Predictions of the remedies for a recipe that does not fit, and of the same recipe without its pins.

All use the largest micro-batch that fits. Until a remedy fits, they are confirmed by full dry runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
    ORDER,
    REMEDIES,
    SETTINGS,
    UNSHARDED,
    broken_rules,
    case_of,
    strategy_from,
)

MOST_VALUES = 4
"""Values of a dropped pin that are tried, where no remedy sets it."""

CONFIRMED = 3
"""Micro-batches of a strategy that are dry-run in full, until one fits."""

_PLAIN_TRIES = [
    values for each in REMEDIES if each.adapter is each.optimizer is None for values in each.tries
]
"""What the remedies set that train all weights with the recipe's own optimizer, in their order."""


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
    _seen: set[tuple[AdapterSpec | None, OptimizerSpec, Strategy]] = field(default_factory=set)
    _predictors: dict[tuple[AdapterSpec | None, OptimizerSpec], Predictor] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether a remedy fits. DDP does not count: the next one may be better (planner/fit_advice.py)."""
        return any(outcome.fits and outcome.remedy is not UNSHARDED for outcome in self.outcomes)

    def try_remedy(self, remedy: Remedy) -> None:
        """Predict its tries up to the first that fits, where the recipe has what the remedy changes."""
        asked = _with_remedy(self.recipe, remedy)
        if asked is None:
            return
        predictor = self._predictor(asked)
        for values in remedy.tries:
            if asked is self.recipe and remedy is not UNSHARDED and _only_divides(predictor, values):
                continue
            for strategy in _strategies(predictor, values):
                key = asked.adapter, asked.optimizer, strategy
                if key in self._seen:
                    continue
                self._seen.add(key)
                candidate = _candidate(predictor, strategy, quick=self.quick or self.settled)
                overrides = (
                    *_section_overrides(self.recipe, asked),
                    *_setting_overrides(asked, values, strategy),
                )
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
        """The first remedy that fits without some pins, with all weights trained."""
        kept = {key: value for key, value in self.recipe.strategy.items() if key not in pins}
        asked = self.recipe.model_copy(update={"strategy": kept})
        predictor = Predictor(asked, blueprint_of(asked), self.cluster)
        for other in _other_values(predictor, self.recipe, pins):
            tries = (
                strategy
                for values in _PLAIN_TRIES
                for strategy in _strategies(predictor, {**values, **other})
            )
            unseen = [
                s for s in dict.fromkeys(tries) if (asked.adapter, asked.optimizer, s) not in self._seen
            ]
            if (candidate := _first_fitting(predictor, unseen)) is not None:
                values = candidate.strategy.values
                shown = [*pins, *(key for key in _PLAIN_TRIES[0] if key not in (*pins, *kept))]
                overrides = tuple(
                    f"strategy.{s.key}={values[s.key]}"
                    for s in SETTINGS
                    if s.key in shown and (s.key in pins or values[s.key] != s.default)
                )
                remedy = Remedy(f"unpinned {', '.join(pins)}", "the recipe pins it", ())
                return RemedyOutcome(remedy, overrides, candidate, pins)
        return None

    def _predictor(self, asked: Recipe) -> Predictor:
        key = asked.adapter, asked.optimizer
        if key not in self._predictors:
            self._predictors[key] = Predictor(asked, blueprint_of(asked), self.cluster)
        return self._predictors[key]


def _with_remedy(recipe: Recipe, remedy: Remedy) -> Recipe | None:
    """The recipe with the remedy's adapter or optimizer; None if it trains few weights, or with another optimizer."""
    if remedy.adapter is not None:
        adapter = (recipe.adapter or AdapterSpec()).model_copy(update=dict(remedy.adapter))
        return recipe.model_copy(update={"adapter": adapter})
    if remedy.optimizer is not None:
        plain = recipe.optimizer.name == OptimizerSpec().name and recipe.optimizer.factory is None
        if recipe.adapter is not None or not plain:
            return None
        optimizer = recipe.optimizer.model_copy(update=dict(remedy.optimizer))
        return recipe.model_copy(update={"optimizer": optimizer})
    return recipe


def _strategies(predictor: Predictor, values: Mapping[str, object]) -> Iterator[Strategy]:
    """The strategy with these values and the recipe's pins.

    A value that no candidate equals on these devices, such as a stage of ZeRO on a single one, becomes each of them.
    """
    strategy = strategy_from({**values, **predictor.recipe.strategy})
    possible = _candidates_instead(predictor, strategy, values)
    for chosen in itertools.product(*possible.values()):
        yield strategy.with_values(**dict(zip(possible, chosen, strict=True)))


def _candidates_instead(
    predictor: Predictor, strategy: Strategy, values: Mapping[str, object]
) -> Mapping[str, Sequence[object]]:
    """Candidates of the settings whose values no candidate equals, and which the recipe does not pin."""
    recipe, cluster = predictor.recipe, predictor.cluster
    case = case_of(strategy, cluster.world_size, recipe, cluster.devices_per_node)
    return {
        setting.key: candidates
        for technique in ORDER
        for setting in technique.settings
        if setting.key in values and setting.key not in recipe.strategy
        if (candidates := technique.candidates(setting, case)) and strategy[setting] not in candidates
    }


def _only_divides(predictor: Predictor, values: Mapping[str, object]) -> bool:
    """Whether a remedy sets nothing else than what these devices have no candidate for."""
    strategy, defaults = strategy_from({**values, **predictor.recipe.strategy}), strategy_from({})
    changed = {key for key in values if values[key] != defaults.values[key]}
    return changed <= _candidates_instead(predictor, strategy, values).keys()


def _other_values(
    predictor: Predictor, recipe: Recipe, pins: Sequence[str]
) -> Iterator[Mapping[str, object]]:
    """Values of a single pin that no remedy sets; nothing in particular for others."""
    if len(pins) == 1 and pins[0] not in _PLAIN_TRIES[0]:
        cluster = predictor.cluster
        case = case_of(
            strategy_from(predictor.recipe.strategy),
            cluster.world_size,
            predictor.recipe,
            cluster.devices_per_node,
        )
        for technique in ORDER:
            for setting in technique.settings:
                if setting.key == pins[0]:
                    listed = (setting.default, *technique.candidates(setting, case), *setting.last_resort)
                    others = [v for v in dict.fromkeys(listed) if v != recipe.strategy[setting.key]]
                    yield from ({setting.key: value} for value in itertools.islice(others, MOST_VALUES))
                    return
    yield {}


def _first_fitting(predictor: Predictor, strategies: Sequence[Strategy]) -> Candidate | None:
    """The first strategy that fits in full, of strategies that need less and less memory."""

    def fits(strategy: Strategy) -> bool:
        return _candidate(predictor, strategy, quick=True).verdict == "fits"

    for strategy in strategies[bisect_left(strategies, True, key=fits) :]:
        candidate = _candidate(predictor, strategy, quick=False)
        if candidate.verdict == "fits":
            return candidate
    return None


def _candidate(predictor: Predictor, strategy: Strategy, quick: bool) -> Candidate:
    """The strategy as predicted: quickly, and unless ``quick`` confirmed by a full dry run if it fits.

    A strategy that breaks a rule, or cannot be built here, is invalid with that reason.
    """
    for violation in broken_rules(strategy, predictor.cluster.world_size, predictor.recipe):
        return Candidate(strategy, "", 0, 0.0, "invalid", f"{violation.rule.key}: {violation.rule.reason}")
    try:
        candidate = _largest_that_fits(predictor, strategy)
        if quick or candidate.verdict != "fits":
            return candidate
        size = candidate.strategy[MICRO_BATCH_SIZE]
        smaller = [other for other in predictor.micro_batch_sizes(strategy) if other <= size]
        for size in smaller[:CONFIRMED]:  # fragmentation may need what the largest leaves
            candidate = _in_full(predictor, strategy.with_values(**{MICRO_BATCH_SIZE.key: size}))
            if candidate.verdict == "fits":
                break
        return candidate
    except RecipeError as error:
        return Candidate(strategy, "", 0, 0.0, "invalid", error.what)


def _in_full(predictor: Predictor, strategy: Strategy) -> Candidate:
    predictor.confirm(strategy)
    return predictor.candidates[strategy]


def _largest_that_fits(predictor: Predictor, strategy: Strategy) -> Candidate:
    """The strategy with the largest micro-batch that fits by quick predictions, else with the smallest."""
    key = MICRO_BATCH_SIZE.key
    trials = [strategy.with_values(**{key: size}) for size in predictor.micro_batch_sizes(strategy)]
    if not predictor.may_fit(trials[-1]):
        return predictor.candidates[trials[-1]]

    def fits(trial: Strategy) -> bool:
        predictor.estimate(trial, alone=True)
        return predictor.candidates[trial].verdict == "fits"

    index = min(bisect_left(trials, True, key=fits), len(trials) - 1)
    fits(trials[index])
    return predictor.candidates[trials[index]]


def _section_overrides(recipe: Recipe, asked: Recipe) -> Iterator[str]:
    """The overrides of an adapter and of an optimizer on the command line."""
    if asked.adapter is not None:
        before = recipe.adapter.model_dump() if recipe.adapter else {"quantize": "none"}
        after = asked.adapter.model_dump()
        shown = ("name", "rank", "quantize")
        yield from (f"adapter.{key}={after[key]}" for key in shown if after[key] != before.get(key))
    if asked.optimizer.name != recipe.optimizer.name:
        yield f"optimizer.name={asked.optimizer.name}"


def _setting_overrides(asked: Recipe, values: Mapping[str, object], strategy: Strategy) -> Iterator[str]:
    """The overrides of the settings that a try sets."""
    defaults = strategy_from({})
    for key in values:
        if key not in asked.strategy and strategy.values[key] != defaults.values[key]:
            yield f"strategy.{key}={strategy.values[key]}"
