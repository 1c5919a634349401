"""Predictions of strategies for one recipe on one cluster: each made once, with a verdict (planner/verdicts.py).

An *estimate* is composed from shallow dry runs (planner/compose.py) where that can be done. A *prediction* is a dry run
of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwise.core.errors import RecipeError
from shardwise.core.plan import Candidate
from shardwise.core.progress import Progress, silent
from shardwise.core.strategy import Layout, Strategy
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint, batch_shapes
from shardwise.planner.compose import Composed, Share, StepComposer, least_depth
from shardwise.planner.counts import NotComposable, counter
from shardwise.planner.lower_bound import least_state_bytes, share_of_states
from shardwise.planner.predict import Prediction
from shardwise.planner.ranks import predict_worst
from shardwise.planner.read_ahead import ReadAhead
from shardwise.planner.verdicts import Estimate, Verdicts
from shardwise.recipe.checks import MOST_TOKENS
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    SETTINGS,
    broken_rules,
    has_stages,
    layout_of,
    micro_batches,
    native,
    strategy_line,
    stretch,
    without_stages,
)
from shardwise.technique.base import MOST_PASSES

MOST_PER_PARAMETER = 64
"""No strategy takes more bytes of weights and optimizer state per parameter. Where this much fits, the lower bound is
not computed."""


@dataclass
class Predictor:
    """Predicts strategies and remembers the results.

    Attributes:
        progress: called with a line before every dry run of a whole step.
    """

    recipe: Recipe
    blueprint: Blueprint
    cluster: Cluster
    progress: Progress = silent
    _estimates: dict[Strategy, Estimate] = field(default_factory=dict)
    _composed: dict[Strategy, Estimate] = field(default_factory=dict)
    _predictions: dict[Strategy, Prediction] = field(default_factory=dict)
    _ranks: dict[tuple[Strategy, int], Prediction] = field(default_factory=dict)

    @cached_property
    def composer(self) -> StepComposer | None:
        """Composes estimates from shallow dry runs; None for a model whose depth cannot be varied, or is no more."""
        blocks = self.blueprint.repetition
        if blocks is None or blocks.blocks <= least_depth(blocks.period, blocks.first):
            return None
        count = counter(self.recipe, self.blueprint, self.cluster)
        return StepComposer(count, *blocks, self._bytes_of_sample(), self.cluster)

    @cached_property
    def verdicts(self) -> Verdicts:
        """On every strategy that was predicted, or excluded by the lower bound."""
        return Verdicts(self.recipe, self.cluster)

    @property
    def candidates(self) -> Mapping[Strategy, Candidate]:
        return self.verdicts.candidates

    @property
    def budget_bytes(self) -> int:
        """Device memory that a strategy may use."""
        return self.verdicts.budget_bytes

    @property
    def by_memory(self) -> bool:
        """Whether the recipe asks for the least memory instead of the least time."""
        return self.verdicts.by_memory

    def fits(self, estimate: Estimate) -> bool:
        """Whether the device's and the host's memory suffice, before fragmentation where it is not known."""
        return self.verdicts.fits(estimate)

    def layout(self, strategy: Strategy) -> Layout:
        return layout_of(strategy, self.cluster.world_size)

    def micro_batches(self, strategy: Strategy) -> int:
        return micro_batches(strategy, self.layout(strategy), self.recipe.batch_size)

    # -- which strategies ---------------------------------------------------------------------------

    def possible(self, strategies: Iterable[Strategy]) -> Iterator[Strategy]:
        """Those that break no rule and that the device does not have to emulate beyond what the recipe pins."""
        for strategy in strategies:
            broken = any(broken_rules(strategy, self.cluster.world_size, self.recipe))
            if not broken and native(strategy, self.cluster.device, self.recipe.strategy):
                yield strategy

    @cached_property
    def parameter_counts(self) -> tuple[int, int]:
        """Trained and frozen parameters of the model, which is built to count them."""
        return self.blueprint.parameter_counts()

    def _bytes_of_sample(self) -> int:
        shapes = batch_shapes(self.blueprint, self.recipe.data).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    def micro_batch_sizes(self, strategy: Strategy, free: bool = False) -> list[int]:
        """Micro-batch sizes to try, largest first: the rank's share of the batch in 1, 2, 4, ... passes.

        At most MOST_PASSES. ``free``: whether or not the recipe pins a size.
        """
        if MICRO_BATCH_SIZE.key in self.recipe.strategy and not free:
            return [strategy[MICRO_BATCH_SIZE]]
        share = -(-self.recipe.batch_size // self.layout(strategy).data_degree)
        passes = (2**power for power in range(MOST_PASSES.bit_length()))
        most = MOST_TOKENS // self.recipe.data.sequence_length
        return list(dict.fromkeys(max(1, min(-(-share // count), most)) for count in passes))

    def may_fit(self, strategy: Strategy) -> bool:
        """Whether the lower bound is within the budget. Records the candidate when it is not."""
        layout = self.layout(strategy)
        samples = self._sample_bytes(layout)
        # An upper bound first: the lower one takes dry runs of probes.
        most = sum(self.parameter_counts) * MOST_PER_PARAMETER * share_of_states(layout)
        if most + samples <= self.budget_bytes or (least := self.least_bytes(strategy)) <= self.budget_bytes:
            return True
        self.verdicts.exclude(strategy, least)
        return False

    def least_bytes(self, strategy: Strategy) -> int:
        """A lower bound of a strategy's memory: weights, optimizer state, and a step's samples."""
        layout = self.layout(strategy)
        states = least_state_bytes(self.parameter_counts, strategy, layout, self.recipe, self.cluster)
        return states + self._sample_bytes(layout)

    def _sample_bytes(self, layout: Layout) -> int:
        """Bytes of a rank's samples, which lie on the device for a whole step."""
        return -(-self.recipe.batch_size // layout.data_degree) * self._bytes_of_sample()

    # -- estimates ----------------------------------------------------------------------------------

    def estimate(self, strategy: Strategy, *, alone: bool = False) -> Estimate:
        """Memory and time without a dry run of the whole step, where that can be done; recorded with a verdict.

        Args:
            alone: whether no other strategy is expected to share its origin, whose dry runs are then in vain.
        """
        if strategy not in self._estimates:
            with self._counting(strategy):
                self._estimates[strategy] = self._composed[strategy] = self._estimated(strategy, alone)
        estimate = self._estimates[strategy]
        self.verdicts.judge(estimate)
        return estimate

    def _estimated(self, strategy: Strategy, alone: bool) -> Estimate:
        layout = self.layout(strategy)
        composer = self.composer
        if has_stages(layout):
            budget, seen = self.budget_bytes, self._ranks
            prediction = predict_worst(*self._asked(strategy), whole=False, budget=budget, seen=seen)
            return replace(self.verdicts.exact(prediction), exact=False, note="")
        if composer is None:
            return self.verdicts.exact(self.confirm(strategy))
        count = self.micro_batches(strategy)
        try:
            if alone and not composer.knows(strategy):
                return self._priced(strategy, composer.alone(strategy, layout, count))
            return self._priced(strategy, composer.composed(strategy, layout, count))
        except NotComposable:
            return self.verdicts.exact(self.confirm(strategy))

    def stage_estimate(self, strategy: Strategy) -> Estimate:
        """A rank's share of the strategy without pipeline stages. It is not recorded. Raises NotComposable.

        Stages are taken to have equal work. Their technique says how long they wait for each other, and how many
        micro-batches are in flight (``Dividing.stretch``). Embedding and head are on one rank each, so this only orders
        strategies with stages; dry runs of their ranks decide.
        """
        layout, count = self.layout(strategy), self.micro_batches(strategy)
        if self.composer is None:
            raise NotComposable("the depth of the model cannot be varied")
        flat = without_stages(strategy)
        ranks = layout.ranks(lambda axis: axis.stages)
        waits = stretch(strategy, count)
        whole = self.layout(flat)
        # A rank's share of states relative to the model without stages: 1 where a group shards over all ranks.
        states = layout.state_copies / whole.state_copies
        share = Share(1 / ranks, 1 / ranks, waits.kept, waits.longer, states, layout)
        with self._counting(strategy):
            composed = self.composer.composed(flat, whole, count, share)
        bound = least_state_bytes(self.parameter_counts, strategy, layout, self.recipe, self.cluster)
        lacking = int(bound * (1 - 1 / (states * ranks)))
        return self._priced(strategy, composed, states=states, more=lacking)

    def _priced(
        self, strategy: Strategy, composed: Composed, *, states: float = 1.0, more: int = 0
    ) -> Estimate:
        """An estimate with the device's overhead; ``more`` bytes of states, ``states`` times those in host memory."""
        profile = self.cluster.device.overhead
        overhead = profile.workspace_bytes + profile.outside_allocator(composed.communicators)
        # The ledger may have overhead of its own, such as kernels that a library keeps.
        tensors = composed.ledger.total + max(0, more)
        return Estimate(
            strategy,
            False,
            tensors + overhead,
            tensors,
            composed.ledger.activations,
            int(composed.host.total * states),
            composed.time.seconds,
            composed.time.split,
            composed.computing,
            composed.updating,
        )

    def relative(self, strategy: Strategy, known: Estimate) -> Estimate:
        """The estimate of a strategy from ``known``, by how both differ without what costs seconds once; recorded.

        Such values, such as compiled blocks, take seconds to count. They save activations: the same part of those that
        the other strategy keeps. Where one has pipeline stages, it is a part of all bytes. Raises NotComposable.
        """
        if strategy in self._predictions:
            return self.estimate(strategy)
        plain, plain_known = map(without_one_time_costs, (strategy, known.strategy))
        other, mine = self._comparable(plain), self._comparable(plain_known)
        staged = any(has_stages(self.layout(candidate)) for candidate in (strategy, known.strategy))
        # A neighbour keeps up to twice as much; more is relative to a peak that keeps next to nothing.
        part = min(other.activations / max(1, mine.activations), 2.0)
        if staged:
            part = other.tensors / mine.tensors
        tensors = int(other.tensors - (mine.tensors - known.tensors) * part)
        ratio = known.seconds / mine.seconds
        if plain == strategy and plain_known != known.strategy:  # the one-time cost itself is what differs
            tensors = other.tensors
            ratio = 1.0
        estimate = replace(
            other,
            strategy=strategy,
            bytes=tensors + other.bytes - other.tensors,
            tensors=tensors,
            seconds=other.seconds * ratio,
            split={part: spent * ratio for part, spent in other.split.items()},
        )
        if not staged:  # ranks of stages may be dry-run, which is more exact
            self._estimates[strategy] = estimate
        self.verdicts.judge(estimate)
        return estimate

    def _comparable(self, strategy: Strategy) -> Estimate:
        if has_stages(self.layout(strategy)):
            return self.stage_estimate(strategy)
        if strategy not in self._composed:
            with self._counting(strategy):
                self._composed[strategy] = self._estimated(strategy, alone=True)
        return self._composed[strategy]

    def count_ahead(self, strategies: Sequence[Strategy]) -> None:
        """Dry-run on all cores what the estimates of these strategies are composed from."""
        if self.composer is None or self.cluster.device.traits.is_host:
            return
        composer = self.composer
        flat = dict.fromkeys(
            (without_stages(strategy), self.micro_batches(strategy)) for strategy in strategies
        )
        points = dict.fromkeys(
            point for strategy, count in flat for point in composer.wanted(strategy, count)
        )
        missing = [point for point in points if point not in composer.points]
        with ReadAhead(composer.count, missing) as ahead:
            for number, point in enumerate(missing):
                try:
                    composer.points[point] = ahead.get(number)
                except RecipeError:  # a package is missing, or the model refuses: said where it is asked for
                    continue

    def smallest(self) -> Strategy:
        """The strategy that needs the least memory, of candidates that do not fit and may be lower bounds.

        Of candidates with equal bounds only the last, which recomputes most, is estimated.
        """
        refused = [c for c in self.candidates.values() if c.verdict == "does not fit"]
        last = {candidate.peak_bytes: candidate for candidate in refused}
        sizes: dict[Strategy, int] = {}
        for least, candidate in sorted(last.items(), key=lambda item: item[0]):
            if min(sizes.values(), default=math.inf) <= least:
                break
            with suppress(RecipeError):  # it cannot be built
                strategy = candidate.strategy
                bound = candidate.step_seconds == 0.0
                sizes[strategy] = self.estimate(strategy, alone=True).bytes if bound else least
        return min(sizes, key=lambda strategy: sizes[strategy], default=last[min(last)].strategy)

    # -- predictions --------------------------------------------------------------------------------

    def confirm(self, strategy: Strategy) -> Prediction:
        """Predict the worst rank by dry runs of the whole step; recorded with a verdict."""
        if strategy not in self._predictions:
            line = strategy_line(strategy, self.layout(strategy), self.recipe.batch_size)
            made = f"{len(self.candidates)} strategies predicted"
            self.progress("; ".join([*self.verdicts.best_so_far(), made, f"dry run of {line}"]))
            with self._counting(strategy):
                self._predictions[strategy] = predict_worst(
                    *self._asked(strategy), budget=self.budget_bytes, seen=self._ranks
                )
        prediction = self._predictions[strategy]
        self._estimates[strategy] = self.verdicts.exact(prediction)
        self.verdicts.judge(self._estimates[strategy])
        return prediction

    def _asked(self, strategy: Strategy) -> tuple[Recipe, Blueprint, Strategy, Cluster]:
        return self.recipe, self.blueprint, strategy, self.cluster

    @contextmanager
    def _counting(self, strategy: Strategy) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            raise RecipeError(
                "a tensor of this model has more bytes than 64 bits count",
                where=strategy_line(strategy, self.layout(strategy), self.recipe.batch_size),
                fix="lower the model's dimensions, data.sequence_length or strategy.micro_batch_size",
            ) from error


def without_one_time_costs(strategy: Strategy) -> Strategy:
    """The strategy without values that cost seconds once, such as compiled blocks."""
    return strategy.with_values(**{s.key: s.default for s in SETTINGS if strategy[s] in s.once})
