"""Choosing a strategy: of the whole space (planner/space.py), the one that is best by the recipe's objective and fits.

Meshes are visited from the one without model axes on. A mesh with one larger degree is visited if a bound leaves it a
chance: its devices' computation alone, perfectly divided and without a collective, must be faster than the best so
far. From a mesh that is no better than those before it, none is visited further.

Within a mesh, counts are composed (planner/compose.py). Candidates of a setting are ordered: a later one is no faster,
all else equal. So a strategy is left out where a plainer one fits with as large a micro-batch, and of each strategy
only the largest micro-batch that fits is taken. Counts cannot be composed where ranks hold different stages. Each
strategy then has dry runs of its own, and the first that fits is taken, with the micro-batch that keeps ranks waiting
least. So it is on the CPU, where collectives are copies between processes, which the model of time knows least.

The best is then dry-run in full, on every kind of rank, with its allocations replayed through the device's allocator.
If it does not fit, the choice is made again without it. Of two that differ by less than the model of time can tell,
the plainer is chosen. A strategy that fits only if the allocator empties its cache in every step is "tight": it is
taken only when nothing else fits, and offloading only where nothing fits without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from shardwise.core.answer import TELLS
from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Layout, Strategy
from shardwise.planner.compose_align import NotComposable
from shardwise.planner.one_time import load_packages, with_one_time_costs
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.quick import Quick, figures_of_stages, quick_figures, smallest
from shardwise.planner.space import Mesh, Space, children
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    has_stages,
    layout_of,
    micro_batches,
    stages_of,
    without_stages,
)

MOST_MESHES = 24
"""Meshes that are visited."""

_WORTH = 0.1
"""A mesh is visited, or stages are cut, if a bound promises at least so much: it leaves out what model axes send."""

MOST_STAGED = 6
"""Strategies with pipeline stages whose ranks get predictions of their own."""

PROMISING = 2
"""Meshes, the best by their trials, all of whose completions are considered."""

BASES = 3
"""Meshes without pipeline stages, the best ones, that are also cut into stages."""

_FAR = 1.25
"""Where even the smallest strategy of a mesh takes so many times the budget, none of the mesh is tried."""

_FULL_PIPELINE = 4
"""Micro-batches for each pipeline stage, at least, that are compared with other meshes."""

_GROWTH_MARGIN = 1.1
"""For memory that does not grow in proportion to the micro-batch, such as rounding to pages."""


def choose_strategy(
    predictor: Predictor, expect: Callable[[Strategy | None], None] = lambda _: None
) -> Prediction:
    """The best strategy that fits, else a tight one, else the one that needs the least memory."""
    separate_host = not predictor.cluster.device.traits.is_host
    tight: Prediction | None = None
    refused: RecipeError | None = None
    for last_resort in (False, True) if separate_host else (False,):
        visit = _Visit(predictor, Space(predictor.recipe, predictor.cluster, last_resort), expect)
        for full in visit.confirmed():
            if full.retries == 0:
                return full
            tight = tight or full
        if tight is not None:
            return tight
        refused = refused or visit.refused
    too_large = [c for c in predictor.candidates.values() if c.verdict == "does not fit"]
    if refused is not None and not too_large:
        raise refused
    if not too_large:
        raise RecipeError("strategy: no combination of its free settings follows the rules on this cluster")
    return predictor.predict(smallest(predictor, too_large), quick=False)


@dataclass
class _Visit:
    """One walk through a space.

    Attributes:
        expect: called with a strategy that may be chosen, before its full prediction; with None if it is not.
        found: figures of strategies that may fit, plainest first.
        failed: strategies that do not fit by their full predictions, or are tight.
        reference: seconds of the kernels of the first strategy's passes, for how many sequences of each rank.
        promising: origins of which a trial was faster than all before.
        composed: origins without pipeline stages all of whose completions were considered.
        refused: the first error of a strategy that cannot be built here.
    """

    predictor: Predictor
    space: Space
    expect: Callable[[Strategy | None], None]
    found: list[Quick] = field(default_factory=list)
    promising: dict[Strategy, Quick] = field(default_factory=dict)
    composed: list[Strategy] = field(default_factory=list)
    failed: set[Strategy] = field(default_factory=set)
    reference: tuple[float, float] | None = None
    refused: RecipeError | None = None

    @property
    def by_memory(self) -> bool:
        return self.predictor.recipe.plan.objective == "memory"

    @cached_property
    def meshes(self) -> Mapping[Mesh, Sequence[Strategy]]:
        return self.space.meshes()

    @cached_property
    def walked(self) -> Mapping[Mesh, Sequence[Strategy]]:
        """Meshes without pipeline stages, where there are any: those with stages are composed from them."""
        if self.predictor.composer is None:
            return self.meshes
        flat = {mesh: own for mesh, own in self.meshes.items() if not self._staged(own[0])}
        return flat or self.meshes

    def confirmed(self) -> Iterator[Prediction]:
        """Full predictions that fit, best first by their quick figures."""
        self._walk()
        while self.found:
            quick = self._best()
            for strategy in with_one_time_costs(self.predictor, quick):
                self.expect(strategy)
                full = self.predictor.predict(strategy, quick=False)
                if self.predictor.fits(full):
                    yield full
            self.failed.add(quick.strategy)
            self.expect(None)
            self.found.clear()
            self.promising.clear()
            self._walk()  # figures are remembered

    def _value(self, quick: Quick) -> float:
        return float(quick.bytes) if self.by_memory else quick.seconds

    def _least(self) -> float:
        return min(map(self._value, self.found), default=math.inf)

    def _best(self) -> Quick:
        """The first of those that differ from the best by less than can be told."""
        least = self._least()
        return next(found for found in self.found if self._value(found) <= least * (1 + TELLS))

    # -- meshes -------------------------------------------------------------------------------------

    def _walk(self) -> None:
        """Visit meshes, those with the fewest model ranks first; then stages of the best strategies."""
        meshes = self.walked
        if not meshes:
            return
        queue, seen = [min(meshes, key=math.prod)], set[Mesh]()
        while queue and len(seen) < MOST_MESHES:
            mesh = min(queue, key=math.prod)
            queue.remove(mesh)
            seen.add(mesh)
            before = self._least()
            if self.found and not self._may_beat(meshes[mesh][0], before):
                continue
            self._within_mesh(meshes[mesh], all_of_them=len(seen) == 1 or len(meshes) == 1)
            if self.predictor.cluster.device.traits.is_host and self.found:
                return
            if not self.found or self._least() < before * (1 - TELLS):
                queue += [child for child in children(mesh, meshes) if child not in {*seen, *queue}]
        promising = self.promising
        for origin in sorted(promising, key=lambda strategy: self._value(promising[strategy]))[:PROMISING]:
            self._compose(origin)
        if len(meshes) < len(self.meshes):
            self._add_stages()

    def _within_mesh(self, origins: Sequence[Strategy], all_of_them: bool) -> None:
        """Add strategies of a mesh that may fit: all of the first mesh, else those that a trial shows to be faster.

        With pipeline stages, further schedules are tried only where the first is the best so far.
        """
        for origin in origins:
            known = len(self.found)
            every = list(self.space.completions(origin))
            if not every:
                continue
            if self._staged(origin):
                self._within(origin, every if all_of_them else self._few(origin, every))
                if self.found and self._best() not in self.found[known:]:
                    return
            elif all_of_them:
                self._compose(origin)
            elif (trial := self._trial(origin, every)) is not None:
                self.found.append(trial)
                self.promising[origin] = trial

    def _compose(self, origin: Strategy) -> None:
        """Consider all completions of an origin."""
        if self._flat(origin) not in self.composed:
            self.composed.append(self._flat(origin))
        every = list(self.space.completions(origin))
        with self.predictor.reading_ahead(list(filter(self.predictor.smallest_may_fit, every))):
            load_packages(self.predictor)
            self._within(origin, every)

    def _trial(self, origin: Strategy, every: Sequence[Strategy]) -> Quick | None:
        """The figures of one completion, from its own dry runs, if it fits and is faster than the best so far."""
        for trial in self._few(origin, every):
            size = self._best().strategy[MICRO_BATCH_SIZE] if self.found else 1
            sizes = self._sizes(trial)
            size = next((each for each in sizes if each <= size), sizes[-1])
            tried = trial.with_values(micro_batch_size=size)
            if tried in self.failed or not self.predictor.may_fit(tried):
                continue
            try:
                figures = quick_figures(self.predictor, tried, once=True)
            except RecipeError as error:
                self.refused = self.refused or error
                continue
            if figures.fits:
                return figures if self._value(figures) < self._least() * (1 + TELLS) else None
        return None

    def _add_stages(self) -> None:
        """Add strategies with pipeline stages, those that promise most first, until no other may be the best."""
        tried, bytes_, time = 0, 1.0, 1.0
        for estimate in self._estimates():
            promised = float(estimate.bytes) * bytes_ if self.by_memory else estimate.seconds * time
            if tried == MOST_STAGED or promised > self._least() * (1 - _WORTH):
                return
            if estimate.bytes * bytes_ > self.predictor.budget_bytes:
                continue
            tried += 1
            try:
                quick = quick_figures(self.predictor, estimate.strategy)
            except RecipeError as error:
                self.refused = self.refused or error
                continue
            bytes_, time = quick.bytes / estimate.bytes, quick.seconds / estimate.seconds
            if quick.fits:
                self.found.append(quick)

    def _estimates(self) -> list[Quick]:
        """Estimates of strategies with pipeline stages, best first, on the best of the meshes that were walked."""
        bases = list(
            dict.fromkeys(self._flat(quick.strategy) for quick in sorted(self.found, key=self._value))
        )
        bases = (bases or self.composed)[:BASES]
        staged = (every for mesh, every in self.meshes.items() if mesh not in self.walked)
        origins = [strategy for every in staged for strategy in every if self._flat(strategy) in bases]
        origins = [each for each in origins if not self.found or self._may_beat(each, self._least())]
        every = (strategy for origin in origins for strategy in self.space.completions(origin))
        completed = [strategy for strategy in every if self.predictor.smallest_may_fit(strategy)]
        with self.predictor.reading_ahead(completed, partial(self._sizes, filled=1)):
            estimates = [estimate for strategy in completed for estimate in self._estimates_of(strategy)]
        return sorted((estimate for estimate in estimates if estimate.fits), key=self._value)

    def _estimates_of(self, strategy: Strategy) -> Iterator[Quick]:
        """Estimates of one strategy with pipeline stages, by micro-batch size, as far as they can be composed."""
        for size in self._sizes(strategy, filled=1):  # else half of the stages wait
            trial = strategy.with_values(micro_batch_size=size)
            if trial in self.failed or not self.predictor.may_fit(trial):
                continue
            try:
                yield figures_of_stages(self.predictor, trial)
            except (NotComposable, RecipeError):
                return

    def _flat(self, strategy: Strategy) -> Strategy:
        """The origin of a strategy without its pipeline stages."""
        return self.space.origin_of(without_stages(strategy))

    def _may_beat(self, origin: Strategy, best: float) -> bool:
        """Whether an origin's computation, perfectly divided, without a collective, is faster than the best.

        The optimizer takes what it takes where its work is divided most so far.
        """
        if self.by_memory or self.reference is None:
            return True
        computing, per_sequence = self.reference
        share = self._sequences(origin) / per_sequence
        updating = min((found.updating for found in self.found if found.updating), default=0.0)
        return computing * share + updating < best * (1 - _WORTH)

    def _layout(self, strategy: Strategy) -> Layout:
        return layout_of(strategy, self.predictor.cluster.world_size)

    def _staged(self, strategy: Strategy) -> bool:
        return has_stages(self._layout(strategy))

    def _sequences(self, strategy: Strategy) -> float:
        """Sequences of a step for each rank, were each divided over the ranks that compute it."""
        layout, batch = self._layout(strategy), self.predictor.recipe.batch_size
        data = layout.data_degree
        return -(-batch // data) * data / layout.world_size

    # -- strategies of one mesh ---------------------------------------------------------------------

    def _within(self, origin: Strategy, completions: Sequence[Strategy]) -> None:
        """Add an origin's completions that may fit."""
        stages = self._staged(origin)
        first_will_do = (stages or self.predictor.cluster.device.traits.is_host) and not self.by_memory
        fitting: list[Strategy] = []
        for strategy in completions:
            plainer = (
                other for other in fitting if not self.by_memory and self.space.plainer(other, strategy)
            )
            least = max((other[MICRO_BATCH_SIZE] for other in plainer), default=0)
            try:
                found = self._largest(strategy, above=least, first_will_do=first_will_do)
                if found is not None and stages:
                    found = self._waiting_least(found)
            except RecipeError as error:  # a package is missing, or the model refuses
                self.refused = self.refused or error
                continue
            if found is None and strategy is completions[0] and self._hopeless(completions):
                return
            if found is not None:
                if all(found.strategy != other.strategy for other in self.found):
                    self.found.append(found)
                fitting.append(found.strategy)
                if first_will_do:
                    return

    def _smallest(self, completions: Sequence[Strategy]) -> Strategy:
        """The last of those whose weights and states take least: it recomputes most."""
        return min(reversed(completions), key=self.predictor.least_bytes)

    def _hopeless(self, completions: Sequence[Strategy]) -> bool:
        """Whether the completion that takes the least memory is far from fitting."""
        predictor, smallest = self.predictor, self._smallest(completions)
        trial = smallest.with_values(micro_batch_size=predictor.micro_batch_sizes(smallest)[-1])
        if not predictor.may_fit(trial):
            return True
        try:
            return quick_figures(predictor, trial).bytes > _FAR * predictor.budget_bytes
        except RecipeError:
            return False

    def _few(self, origin: Strategy, every: Sequence[Strategy]) -> Sequence[Strategy]:
        """Of an origin's completions, the best one so far in other meshes, else the plainest; and the smallest."""
        best = self.space.moved(self._best().strategy, origin) if self.found else None
        few = [best if best is not None and best in every else every[0], self._smallest(every)]
        return list(dict.fromkeys(few))

    def _sizes(self, strategy: Strategy, filled: int = _FULL_PIPELINE) -> Sequence[int]:
        """Micro-batch sizes, largest first; of pipeline stages among other meshes, with ``filled`` for each."""
        sizes, stages = self.predictor.micro_batch_sizes(strategy), stages_of(strategy)
        if self.by_memory:
            return sizes[-1:]
        if stages == 1 or len(self.meshes) == 1:
            return sizes
        layout, batch = self._layout(strategy), self.predictor.recipe.batch_size
        filling = [
            size
            for size in sizes
            if micro_batches(strategy.with_values(micro_batch_size=size), layout, batch) >= filled * stages
        ]
        return filling or sizes[-1:]

    def _largest(self, strategy: Strategy, above: int, first_will_do: bool) -> Quick | None:
        """The figures with the largest micro-batch that may fit, of those ``above``."""
        predictor, sizes = self.predictor, self._sizes(strategy)
        if sizes[0] <= above or not self.predictor.smallest_may_fit(strategy):
            return None
        largest = float(sizes[0])
        for size in sizes:
            trial = strategy.with_values(micro_batch_size=size)
            if not above < size <= largest or trial in self.failed:
                continue
            quick = quick_figures(predictor, trial, once=first_will_do)
            if self.reference is None and quick.computing:
                self.reference = quick.computing, self._sequences(trial)
            # Memory is a constant and a part that grows at most in proportion: a larger size than this cannot fit.
            largest = size * _GROWTH_MARGIN * predictor.budget_bytes / quick.bytes
            if quick.fits:
                return quick
        return None

    def _waiting_least(self, quick: Quick) -> Quick:
        """The same strategy with a smaller micro-batch, while predictions get faster."""
        best = quick
        for size in self._sizes(quick.strategy):
            trial = quick.strategy.with_values(micro_batch_size=size)
            if size >= best.strategy[MICRO_BATCH_SIZE] or trial in self.failed:
                continue
            smaller = quick_figures(self.predictor, trial)
            if not smaller.fits or smaller.seconds >= best.seconds:
                break
            best = smaller
        return best
