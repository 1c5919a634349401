"""A search through the space of strategies (planner/space.py): the meshes it visits, and what it estimates of each.

Meshes are visited from the one without model axes on. A mesh with one larger degree is visited if a bound leaves it a
chance: its devices' computation alone, perfectly divided and without a collective, must be faster than the best so
far. From a mesh that is no better than those before it, none is visited further.

Within a mesh, estimates are composed (planner/compose.py). Candidates of a setting are ordered: a later one is no
faster, all else equal. So a strategy is left out where a plainer one fits with as large a micro-batch, and of each
strategy only the largest micro-batch that fits is taken. Strategies with pipeline stages are composed from those
without; the most promising ones have dry runs of their ranks. On the CPU, where collectives are copies between
processes, which the model of time knows least, the first strategy that fits is taken, the plainest of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.core.answer import TELLS
from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Strategy
from shardwise.planner.counts import NotComposable
from shardwise.planner.fragmentation import LearnedFragmentation
from shardwise.planner.one_time import with_one_time_costs
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.space import Mesh, Space, blocks_and_loss
from shardwise.planner.verdicts import Estimate
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    has_stages,
    stages_of,
    without_stages,
)

MOST_MESHES = 24
"""Meshes that are visited."""

_WORTH = 0.1
"""A mesh is visited, or stages are cut, if a bound promises at least so much: it leaves out what model axes send."""

MOST_STAGED = 6
"""Strategies with pipeline stages whose ranks get dry runs of their own."""

BEST_MESHES = 2
"""Meshes, the best by their trials, all of whose completions are considered, and that are cut into stages."""

_FULL_PIPELINE = 4
"""Micro-batches for each pipeline stage, at least, that are compared with other meshes."""


@dataclass
class StrategySearch:
    """One search through a space.

    Attributes:
        limit: what the best must not exceed.
        only: the completions that are considered, where not all are; the search then visits the plainest mesh alone.
        fitting: estimates of strategies that may fit, plainest first.
        failed: strategies that do not fit by their full dry runs, or are tight.
        fragmentation: what the allocator lost in failed strategies.
        reference: seconds of the kernels of the first strategy's passes, for how many sequences of each rank.
        trials: origins with a trial that was faster than all before, and its estimate.
        composed: origins without pipeline stages all of whose completions were considered.
        refused: the first error of a strategy that cannot be built here.
    """

    predictor: Predictor
    space: Space
    limit: float = math.inf
    only: Callable[[Strategy], bool] | None = None
    fitting: list[Estimate] = field(default_factory=list)
    failed: set[Strategy] = field(default_factory=set)
    reference: tuple[float, float] | None = None
    trials: dict[Strategy, Estimate] = field(default_factory=dict)
    composed: list[Strategy] = field(default_factory=list)
    refused: RecipeError | None = None

    def __post_init__(self) -> None:
        self.fragmentation = LearnedFragmentation(self.predictor)

    def confirmed(self) -> Iterator[Prediction]:
        """Full predictions that fit, best first by their estimates."""
        self._walk()
        while self.fitting and self._least() <= self.limit:
            best = self._best()
            for strategy, most_seconds in with_one_time_costs(self.predictor, best):
                try:
                    full = self.predictor.confirm(strategy)
                except RecipeError:  # the model refuses what costs seconds once
                    if strategy == best.strategy:
                        raise
                    continue
                exact = self.predictor.estimate(strategy)
                fits = self.predictor.fits(exact)
                if not fits or exact.retries:
                    self.fragmentation.learn(full)
                if fits and (exact.retries or exact.seconds <= most_seconds):
                    yield self._or_doubtful(full)
                if not fits or exact.retries:
                    break  # without what costs seconds once, a strategy keeps no less
            self.failed.add(best.strategy)
            self.fitting.clear()
            self.trials.clear()
            self._walk()  # estimates are remembered

    def _or_doubtful(self, full: Prediction) -> Prediction:
        """A faster strategy that only the fragmentation of others rules out, if it fits after all; else ``full``."""
        limit = self._value(self.predictor.estimate(full.strategy)) * (1 - TELLS)
        below = min((strategy[MICRO_BATCH_SIZE] for strategy in self.failed), default=1)
        doubtful = self.fragmentation.doubtful_below(below)
        least = next((estimate for estimate in doubtful if self._value(estimate) < limit), None)
        if least is None:
            return full
        other = self.predictor.confirm(least.strategy)
        exact = self.predictor.estimate(other.strategy)
        fits = self.predictor.fits(exact) and not exact.retries and exact.seconds < full.step.seconds
        return other if fits else full

    def _value(self, estimate: Estimate) -> float:
        return float(estimate.bytes) if self.predictor.by_memory else estimate.seconds

    def _least(self) -> float:
        return min(map(self._value, self.fitting), default=math.inf)

    def _best(self) -> Estimate:
        """The first of those that differ from the best by less than can be told."""
        least = self._least()
        return next(estimate for estimate in self.fitting if self._value(estimate) <= least * (1 + TELLS))

    # -- meshes -------------------------------------------------------------------------------------

    @cached_property
    def meshes(self) -> Mapping[Mesh, Sequence[Strategy]]:
        return self.space.meshes()

    @cached_property
    def walked(self) -> Mapping[Mesh, Sequence[Strategy]]:
        """Meshes without pipeline stages, where there are any: those with stages are composed from them."""
        if self.predictor.composer is None:
            return self.meshes
        return {mesh: own for mesh, own in self.meshes.items() if not self._staged(own[0])} or self.meshes

    def _walk(self) -> None:
        """Visit meshes, those with the fewest model ranks first; then stages of the best strategies."""
        meshes = self.walked
        queue = sorted(meshes, key=math.prod)[:1]
        seen = set[Mesh]()
        while queue and len(seen) < (MOST_MESHES if self.only is None else 1):
            mesh = min(queue, key=math.prod)
            queue.remove(mesh)
            seen.add(mesh)
            before = self._least()
            if self.fitting and not self._may_beat(meshes[mesh][0], before):
                continue
            self._visit(meshes[mesh], every=len(seen) == 1 or len(meshes) == 1)
            if self.predictor.cluster.device.traits.is_host and self.fitting:
                return
            if not self.fitting or self._least() < before * (1 - TELLS):
                queue += [m for m in self.space.children(mesh, meshes) if m not in {*seen, *queue}]
        trials = self.trials
        for origin in sorted(trials, key=lambda strategy: self._value(trials[strategy]))[:BEST_MESHES]:
            self._compose(origin)
        if len(meshes) < len(self.meshes) and self.only is None:
            self._add_stages()

    def _visit(self, origins: Sequence[Strategy], every: bool) -> None:
        """Add strategies of a mesh that may fit: all, or those that a trial shows to be faster.

        With pipeline stages, further schedules are tried only where the first is the best so far.
        """
        for origin in origins:
            known, completions = len(self.fitting), list(self.space.completions(origin))
            if not completions:
                continue
            if self._staged(origin):
                self._add(completions if every else self._few(origin, completions))
                if self.fitting and self._best() not in self.fitting[known:]:
                    return
            elif every:
                self._compose(origin)
            elif (trial := self._trial(origin, completions)) is not None:
                self.fitting.append(trial)
                self.trials[origin] = trial

    def _compose(self, origin: Strategy) -> None:
        """Consider all completions of an origin."""
        if self._flat(origin) not in self.composed:
            self.composed.append(self._flat(origin))
        completions = list(self.space.completions(origin))
        predictor = self.predictor
        if self.only is not None:
            completions = list(filter(self.only, completions))
        largest = ((s, predictor.micro_batch_sizes(s)[0]) for s in completions if self._smallest_may_fit(s))
        predictor.count_ahead([s.with_values(micro_batch_size=size) for s, size in largest])
        self._add(completions)

    def faster_without_states(self, limit: float) -> Collection[tuple[Strategy, ...]]:
        """What blocks and the loss may keep where a step takes less than ``limit``, and fits but for the states."""
        predictor = self.predictor
        combinations: set[tuple[Strategy, ...]] = set()
        origins = self.walked[min(self.walked, key=math.prod)]
        if self._least_seconds(origins[0]) >= limit:
            return combinations
        completions = (strategy for origin in origins for strategy in self.space.completions(origin))
        for strategy in filter(self._smallest_may_fit, completions):
            if (key := blocks_and_loss(strategy)) in combinations:
                continue
            for size in self._sizes(strategy):
                try:
                    estimate = predictor.estimate(strategy.with_values(micro_batch_size=size))
                except RecipeError:  # a package is missing, or the model refuses
                    break
                rest = estimate.bytes - predictor.least_bytes(estimate.strategy)
                if estimate.seconds < limit and rest < predictor.budget_bytes:
                    combinations.add(key)
                    break
        return combinations

    def _few(self, origin: Strategy, completions: Sequence[Strategy]) -> Sequence[Strategy]:
        """The best of other meshes, before it one that recomputes no exchange, and the one that takes least."""
        best = self.space.moved(self._best().strategy, origin) if self.fitting else completions[0]
        best = best if best in completions else completions[0]
        exchanges = self.space.divides_some_layers(origin)
        plainer = next((s for s in completions if exchanges and self.space.plainer(s, best)), best)
        smallest = min(reversed(completions), key=self.predictor.least_bytes)  # the last recomputes most
        return list(dict.fromkeys([plainer, best, smallest]))

    def _trial(self, origin: Strategy, completions: Sequence[Strategy]) -> Estimate | None:
        """The estimate of one completion, from its own dry runs, if it fits and is faster than the best so far."""
        for trial in self._few(origin, completions):
            size = self._best().strategy[MICRO_BATCH_SIZE] if self.fitting else 1
            sizes = self._sizes(trial)
            size = next((other for other in sizes if other <= size), sizes[-1])
            tried = trial.with_values(micro_batch_size=size)
            if tried in self.failed or not self.predictor.may_fit(tried):
                continue
            try:
                estimate = self.predictor.estimate(tried, alone=True)
            except RecipeError as error:
                self.refused = self.refused or error
                continue
            if self.fragmentation.allows(estimate):
                return estimate if self._value(estimate) < self._least() * (1 + TELLS) else None
        return None

    def _may_beat(self, origin: Strategy, best: float) -> bool:
        """Whether a bound leaves an origin a chance to be faster than the best."""
        return self.predictor.by_memory or self._least_seconds(origin) < best * (1 - _WORTH)

    def _least_seconds(self, origin: Strategy) -> float:
        """Seconds of an origin's computation, perfectly divided, without a collective; 0 where not known.

        The optimizer takes what it takes where its work is divided most so far.
        """
        if self.reference is None:
            return 0.0
        computing, per_sequence = self.reference
        share = self._sequences(origin) / per_sequence
        updating = min((estimate.updating for estimate in self.fitting if estimate.updating), default=0.0)
        return computing * share + updating

    def _sequences(self, strategy: Strategy) -> float:
        """Sequences of a step for each rank, were each divided over the ranks that compute it."""
        layout = self.predictor.layout(strategy)
        batch = self.predictor.recipe.batch_size
        data = layout.data_degree
        return -(-batch // data) * data / layout.world_size

    # -- pipeline stages ----------------------------------------------------------------------------

    def _staged(self, strategy: Strategy) -> bool:
        return has_stages(self.predictor.layout(strategy))

    def _flat(self, strategy: Strategy) -> Strategy:
        """The origin of a strategy without its pipeline stages."""
        return self.space.origin_of(without_stages(strategy))

    def _add_stages(self) -> None:
        """Add strategies with pipeline stages, those that promise most first, until no other may be the best."""
        tried, bytes_, time = 0, 1.0, 1.0
        for estimate in self._stage_estimates():
            promised = estimate.bytes * bytes_ if self.predictor.by_memory else estimate.seconds * time
            if tried == MOST_STAGED or promised > self._least() * (1 - _WORTH):
                return
            if estimate.bytes * bytes_ > self.predictor.budget_bytes:
                continue
            tried += 1
            try:
                own = self.predictor.estimate(estimate.strategy)
            except RecipeError as error:
                self.refused = self.refused or error
                continue
            bytes_, time = own.bytes / estimate.bytes, own.seconds / estimate.seconds
            if self.fragmentation.allows(own):
                self.fitting.append(own)

    def _stage_estimates(self) -> list[Estimate]:
        """Composed estimates with pipeline stages that fit, best first, on the best of the meshes that were walked."""
        fitting = sorted(self.fitting, key=self._value)
        bases = list(dict.fromkeys(self._flat(estimate.strategy) for estimate in fitting)) or self.composed
        staged = (origins for mesh, origins in self.meshes.items() if mesh not in self.walked)
        trials = [
            strategy.with_values(micro_batch_size=size)
            for origin in (origin for origins in staged for origin in origins)
            if self._flat(origin) in bases[:BEST_MESHES]
            if not self.fitting or self._may_beat(origin, self._least())
            for strategy in self.space.completions(origin)
            if self._smallest_may_fit(strategy)
            for size in self._sizes(strategy, filled=1)  # else half of the stages wait
        ]
        trials = [trial for trial in trials if trial not in self.failed and self.predictor.may_fit(trial)]
        self.predictor.count_ahead(trials)
        return sorted(filter(self.fragmentation.allows, self._composed_stages(trials)), key=self._value)

    def _composed_stages(self, trials: Iterable[Strategy]) -> Iterator[Estimate]:
        for trial in trials:
            try:
                yield self.predictor.stage_estimate(trial)
            except (NotComposable, RecipeError):
                continue

    # -- strategies of one origin -------------------------------------------------------------------

    def _add(self, completions: Sequence[Strategy]) -> None:
        """Add completions that may fit."""
        host = self.predictor.cluster.device.traits.is_host
        by_memory = self.predictor.by_memory
        first_will_do = (host or self._staged(completions[0])) and not by_memory
        added: list[Strategy] = []
        for strategy in completions:
            plainer = [
                s[MICRO_BATCH_SIZE] for s in added if not by_memory and self.space.plainer(s, strategy)
            ]
            try:
                estimate = self._largest(strategy, above=max(plainer, default=0), alone=first_will_do)
                if estimate is not None and self._staged(strategy):
                    estimate = self._waiting_least(estimate)
            except RecipeError as error:  # a package is missing, or the model refuses
                self.refused = self.refused or error
                continue
            if estimate is not None:
                if all(estimate.strategy != other.strategy for other in self.fitting):
                    self.fitting.append(estimate)
                added.append(estimate.strategy)
                if first_will_do:
                    return

    def _sizes(self, strategy: Strategy, filled: int = _FULL_PIPELINE) -> Sequence[int]:
        """Micro-batch sizes, largest first; of stages among other meshes, with ``filled`` for each; by memory, two."""
        sizes = self.predictor.micro_batch_sizes(strategy)
        stages = stages_of(strategy)
        if self.predictor.by_memory:
            return list(dict.fromkeys((sizes[-1], sizes[0])))  # a single pass accumulates no gradients
        if stages == 1 or len(self.meshes) == 1:
            return sizes
        trials = (strategy.with_values(micro_batch_size=size) for size in sizes)
        filling = [t[MICRO_BATCH_SIZE] for t in trials if self.predictor.micro_batches(t) >= filled * stages]
        return filling or sizes[-1:]

    def _smallest_may_fit(self, strategy: Strategy) -> bool:
        """Whether the strategy may fit with its smallest micro-batch."""
        size = self.predictor.micro_batch_sizes(strategy)[-1]
        return self.predictor.may_fit(strategy.with_values(micro_batch_size=size))

    def _largest(self, strategy: Strategy, above: int, alone: bool) -> Estimate | None:
        """The estimate with the largest micro-batch that may fit, of those ``above``; by memory, the least."""
        sizes = self._sizes(strategy)
        best: Estimate | None = None
        if sizes[0] <= above or not self._smallest_may_fit(strategy):
            return None
        for size in sizes:
            trial = strategy.with_values(micro_batch_size=size)
            if size <= above or trial in self.failed:
                continue
            estimate = self.predictor.estimate(trial, alone=alone)
            if self.reference is None and estimate.computing:
                self.reference = estimate.computing, self._sequences(trial)
            if self.fragmentation.allows(estimate) and (best is None or estimate.bytes < best.bytes):
                best = estimate
                if not self.predictor.by_memory:
                    break
        return best

    def _waiting_least(self, estimate: Estimate) -> Estimate:
        """The same strategy with a smaller micro-batch, while predictions get faster."""
        best = estimate
        for size in self._sizes(estimate.strategy):
            trial = estimate.strategy.with_values(micro_batch_size=size)
            if size >= best.strategy[MICRO_BATCH_SIZE] or trial in self.failed:
                continue
            smaller = self.predictor.estimate(trial)
            if not self.fragmentation.allows(smaller) or smaller.seconds >= best.seconds:
                break
            best = smaller
        return best
