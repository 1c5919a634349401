"""Predictions of strategies for one recipe on one cluster: each made once, with a verdict against the memory budget.

The budget is the device's capacity less a reserve. A strategy fits when its worst rank stays within the budget, and
its offloaded state within that rank's share of host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.core.errors import RecipeError
from shardwise.core.errors import one_line as printable
from shardwise.core.plan import Candidate, PeakIs, moment
from shardwise.core.progress import Progress, silent
from shardwise.core.strategy import Layout, Strategy
from shardwise.core.units import format_bytes, format_seconds
from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.hardware.cluster import Cluster
from shardwise.model.blueprint import Blueprint, batch_shapes
from shardwise.planner.compose import COMPOSED_DEPTH, CountComposer
from shardwise.planner.compose_cache import with_disk_cache
from shardwise.planner.compose_corner import corner_counter
from shardwise.planner.lower_bound import least_state_bytes, share_of_states
from shardwise.planner.predict import Prediction
from shardwise.planner.sketch import Share, Sketch, Sketcher
from shardwise.planner.worst_rank import predict_worst
from shardwise.recipe.checks import MOST_TOKENS
from shardwise.recipe.sections import Recipe
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    broken_rules,
    layout_of,
    micro_batches,
    native,
    one_line,
    without_stages,
)
from shardwise.technique.base import MOST_PASSES

MOST_PER_PARAMETER = 64
"""No strategy takes more bytes of weights and optimizer state per parameter. Where this much fits, the lower bound is
not computed."""

UNKNOWN = "could not be predicted"
"""Verdict on a candidate whose dry run failed."""


@dataclass(frozen=True)
class Judgement:
    """A candidate, and whether its memory has its fragmentation; None if it was excluded by the lower bound."""

    candidate: Candidate
    replayed: bool | None


@dataclass
class Predictor:
    """Predicts strategies and remembers the results.

    Attributes:
        candidates: one per strategy that was predicted, or excluded by the lower bound.
        progress: called with a line before every prediction.
    """

    recipe: Recipe
    blueprint: Blueprint
    cluster: Cluster
    candidates: dict[Strategy, Candidate] = field(default_factory=dict)
    progress: Progress = silent
    _replayed: dict[Strategy, bool] = field(default_factory=dict)
    _quick: dict[tuple[Strategy, int], Prediction] = field(default_factory=dict)

    @cached_property
    def composer(self) -> CountComposer | None:
        """Composes quick predictions from few dry runs; None for a model of no depth, or no deeper than those."""
        if self.blueprint.depth is None or self.blueprint.depth <= COMPOSED_DEPTH:
            return None
        count = with_disk_cache(
            corner_counter(self.recipe, self.blueprint, self.cluster), self.recipe, self.cluster
        )
        return CountComposer(count, self.blueprint.depth, self._bytes_of_sample())

    @cached_property
    def sketcher(self) -> Sketcher | None:
        """Sketches composed strategies; None where none can be composed."""
        return None if self.composer is None else Sketcher(self.composer, self.cluster)

    @property
    def reserve(self) -> float:
        """Share of the capacity that is left free."""
        return self.cluster.device.traits.reserve

    @property
    def reserve_bytes(self) -> int:
        return int(self.reserve * self.cluster.capacity_bytes)

    @property
    def budget_bytes(self) -> int:
        """Device memory that a strategy may use."""
        return self.cluster.capacity_bytes - self.reserve_bytes

    # -- which strategies ---------------------------------------------------------------------------

    def allowed(self, strategy: Strategy) -> bool:
        """Whether the strategy breaks no rule."""
        return not any(broken_rules(strategy, self.cluster.world_size, self.recipe))

    def possible(self, strategies: Iterable[Strategy]) -> Iterator[Strategy]:
        """Those that break no rule and that the device does not have to emulate beyond what the recipe pins."""
        pinned = self.recipe.strategy
        for strategy in strategies:
            if self.allowed(strategy) and native(strategy, self.cluster.device, pinned):
                yield strategy

    def _share(self, layout: Layout) -> int:
        """Samples of a rank in one step."""
        return -(-self.recipe.batch_size // layout.data_degree)

    def _sample_bytes(self, layout: Layout) -> int:
        """Bytes of a rank's samples, which lie on the device for a whole step."""
        return self._share(layout) * self._bytes_of_sample()

    @cached_property
    def parameter_counts(self) -> tuple[int, int]:
        """Trained and frozen parameters of the model, which is built to count them."""
        return self.blueprint.parameter_counts()

    def _bytes_of_sample(self) -> int:
        shapes = batch_shapes(self.blueprint, self.recipe.data).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    def micro_batch_sizes(self, strategy: Strategy) -> list[int]:
        """Micro-batch sizes to try, largest first: the rank's share of the batch in 1, 2, 4, ... passes.

        At most MOST_PASSES.
        """
        if MICRO_BATCH_SIZE.key in self.recipe.strategy:
            return [strategy[MICRO_BATCH_SIZE]]
        return self.free_micro_batch_sizes(strategy)

    def free_micro_batch_sizes(self, strategy: Strategy) -> list[int]:
        """The same, whether or not the recipe pins a size."""
        share = self._share(layout_of(strategy, self.cluster.world_size))
        passes = (2**power for power in range(MOST_PASSES.bit_length()))
        most = MOST_TOKENS // self.recipe.data.sequence_length
        return list(dict.fromkeys(max(1, min(-(-share // count), most)) for count in passes))

    # -- predictions and verdicts -------------------------------------------------------------------

    def may_fit(self, strategy: Strategy) -> bool:
        """Whether the lower bound is within the budget. Records the candidate when it is not."""
        layout = layout_of(strategy, self.cluster.world_size)
        most = sum(self.parameter_counts) * MOST_PER_PARAMETER * share_of_states(layout)
        if most + self._sample_bytes(layout) <= self.budget_bytes:
            return True
        least = self.least_bytes(strategy)
        if least <= self.budget_bytes:
            return True
        reason = f"weights, optimizer state and a step's samples alone take at least {format_bytes(least)}"
        self._record(strategy, least, 0.0, "does not fit", reason, "at least")
        return False

    def smallest_may_fit(self, strategy: Strategy) -> bool:
        """The same of a strategy with its smallest micro-batch."""
        return self.may_fit(strategy.with_values(micro_batch_size=self.micro_batch_sizes(strategy)[-1]))

    def least_bytes(self, strategy: Strategy) -> int:
        """A lower bound of a strategy's memory: weights, optimizer state, and a step's samples."""
        layout = layout_of(strategy, self.cluster.world_size)
        states = least_state_bytes(self.parameter_counts, strategy, layout, self.recipe, self.cluster)
        return states + self._sample_bytes(layout)

    def predict(
        self, strategy: Strategy, *, quick: bool, ranks: Sequence[int] | None = None, once: bool = False
    ) -> Prediction:
        """Predict the worst rank, or the worst of ``ranks``, and record the candidate with its verdict.

        ``once``: no other strategy is expected to share its origin (compose.py), whose dry runs are then in vain.
        """
        budget = self.budget_bytes
        layout = layout_of(strategy, self.cluster.world_size)
        line = one_line(strategy, layout, self.recipe.batch_size)
        now = f"{'' if quick else 'dry run of '}{line}"
        self.progress("; ".join([*self._best_so_far(), f"{len(self.candidates)} strategies predicted", now]))
        composing = not once or (self.composer is not None and self.composer.knows(strategy))
        found = self.worst(strategy, quick=quick, budget=budget, ranks=ranks, composing=composing)
        over = found.peak.bytes - budget
        verdict, reason = "fits", found.in_words()
        if over > 0:
            verdict = "does not fit"
            if found.sum_bytes > budget:
                where = moment(found.peak.phase, found.peak.where)
                reason = f"{format_bytes(found.sum_bytes - budget)} too much {where}"
        elif (excess := self._host_excess(found)) > 0:
            verdict, reason = "does not fit", f"{format_bytes(excess)} too much in host memory"
        elif found.retries:
            verdict = "tight"
        replayed = found.run.replay is not None or not TARGET_KERNELS[self.cluster.device.kind].caches
        self._replayed[strategy] = replayed
        peak_is: PeakIs = "counted" if replayed and ranks is None else "estimated"
        if verdict == "does not fit" and not replayed:
            peak_is = "at least"
        self._record(
            strategy, found.peak.bytes, found.step.seconds, verdict, reason, peak_is, found.step.split
        )
        return found

    def worst(
        self,
        strategy: Strategy,
        *,
        quick: bool,
        budget: int | None = None,
        ranks: Sequence[int] | None = None,
        composing: bool = True,
    ) -> Prediction:
        """Predict the worst rank without a verdict; against the device's capacity unless a budget is given.

        Raises RecipeError for tensors of more bytes than a 64-bit integer counts.
        """
        with self._counting(strategy):
            return predict_worst(
                self.recipe,
                self.blueprint,
                strategy,
                self.cluster,
                quick=quick,
                budget=budget,
                ranks=ranks,
                seen=self._quick,
                composer=self.composer if composing else None,
            )

    def sketched(self, strategy: Strategy, count: int, share: Share | None = None) -> Sketch:
        """Figures of a composed strategy with ``count`` micro-batches. Raises NotComposable."""
        assert self.sketcher is not None
        with self._counting(strategy):
            return self.sketcher.sketch(strategy, count, share)

    def reading_ahead(
        self, strategies: Sequence[Strategy], sizes: Callable[[Strategy], Sequence[int]] | None = None
    ) -> AbstractContextManager[None]:
        """Count ahead what strategies need where they are composed. Those with pipeline stages are composed without.

        Args:
            sizes: micro-batch sizes of a strategy that are tried, largest first; ``micro_batch_sizes`` by default.
        """
        if self.composer is None or self.cluster.device.traits.is_host:
            return nullcontext()
        sizes = sizes or self.micro_batch_sizes
        return self.composer.reading_ahead(self._trial(strategy, sizes(strategy)) for strategy in strategies)

    def _trial(self, strategy: Strategy, sizes: Sequence[int]) -> tuple[Strategy, Sequence[int]]:
        """A strategy with its largest micro-batch, and the numbers of micro-batches of all sizes.

        A strategy with pipeline stages is composed without them; its numbers of micro-batches are its own.
        """
        layout = layout_of(strategy, self.cluster.world_size)
        trials = [strategy.with_values(micro_batch_size=size) for size in sizes]
        counts = [micro_batches(trial, layout, self.recipe.batch_size) for trial in trials]
        return without_stages(trials[0]), counts

    @contextmanager
    def _counting(self, strategy: Strategy) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            line = one_line(strategy, layout_of(strategy, self.cluster.world_size), self.recipe.batch_size)
            raise RecipeError(
                "a tensor of this model has more bytes than 64 bits count",
                where=line,
                fix="lower the model's dimensions, data.sequence_length or strategy.micro_batch_size",
            ) from error

    def fits(self, prediction: Prediction) -> bool:
        """Whether a prediction is within the budget and its share of host memory."""
        return prediction.peak.bytes <= self.budget_bytes and self._host_excess(prediction) <= 0

    def might_fit(self, quick: Prediction) -> bool:
        """The same before fragmentation, which a quick prediction does not have."""
        return quick.sum_bytes <= self.budget_bytes and self._host_excess(quick) <= 0

    def replayed(self, strategy: Strategy) -> bool:
        """Whether the last prediction of a strategy has its fragmentation, if its device's allocator has any."""
        return self._replayed[strategy]

    def record_quick(self, strategy: Strategy, size: int, seconds: float, over: int, excess: int) -> None:
        """Record a composed candidate of ``size`` bytes, so many over the budget and the host's share."""
        reason = f"{format_bytes(over)} too much" if over > 0 else ""
        if over <= 0 < excess:
            reason = f"{format_bytes(excess)} too much in host memory"
        verdict, caches = (
            "does not fit" if reason else "fits",
            TARGET_KERNELS[self.cluster.device.kind].caches,
        )
        self._replayed[strategy] = not caches
        peak_is: PeakIs = "counted" if not caches else "at least" if reason else "estimated"
        self._record(strategy, size, seconds, verdict, reason, peak_is)

    def quiet(self) -> None:
        """Show no progress from now on."""
        self.progress = silent

    def judgement(self, strategy: Strategy) -> Judgement:
        """The record of a strategy."""
        return Judgement(self.candidates[strategy], self._replayed.get(strategy))

    def adopt(self, strategy: Strategy, judgement: Judgement | None) -> None:
        """Record what another process found, as the last candidate."""
        self.candidates.pop(strategy, None)
        if judgement is None:
            return
        self.candidates[strategy] = judgement.candidate
        if judgement.replayed is not None:
            self._replayed[strategy] = judgement.replayed

    def record_failure(self, strategy: Strategy, error: Exception) -> None:
        """Record a candidate whose dry run raised an error."""
        self._record(strategy, 0, 0.0, UNKNOWN, printable(f"{type(error).__name__}: {error}"), "counted")

    def _host_excess(self, prediction: Prediction) -> int:
        """Bytes beyond the rank's share of host memory; negative when there is room."""
        return prediction.host.total - self.cluster.host_capacity_bytes

    def _best_so_far(self) -> Iterator[str]:
        """The best of those that fit, in words."""
        by_memory = self.recipe.plan.objective == "memory"
        fitting = (candidate for candidate in self.candidates.values() if candidate.verdict == "fits")
        best = min(fitting, key=lambda c: c.peak_bytes if by_memory else c.step_seconds, default=None)
        if best is not None:
            took, held = format_seconds(best.step_seconds), format_bytes(best.peak_bytes)
            yield f"best so far {best.line}, {took}, {held}"

    def _record(
        self,
        strategy: Strategy,
        peak: int,
        seconds: float,
        verdict: str,
        reason: str,
        peak_is: PeakIs,
        split: Mapping[str, float] | None = None,
    ) -> None:
        layout = layout_of(strategy, self.cluster.world_size)
        line = one_line(strategy, layout, self.recipe.batch_size)
        candidate = Candidate(strategy, line, peak, seconds, verdict, reason, peak_is, split or {})
        self.candidates[strategy] = candidate
