"""Estimates of strategies, and their verdicts against the memory budget.

The budget is the device's capacity less a reserve. A strategy fits when its worst rank stays within the budget, and
its offloaded state within that rank's share of host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.core.errors import one_line as printable
from shardwise.core.plan import Candidate, PeakIs, moment
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes, format_seconds
from shardwise.dryrun.target import TARGET_KERNELS
from shardwise.hardware.cluster import Cluster
from shardwise.planner.predict import Prediction
from shardwise.recipe.sections import Recipe
from shardwise.technique import layout_of, strategy_line

UNKNOWN = "could not be predicted"
"""Verdict on a candidate whose dry run failed."""


@dataclass(frozen=True)
class Estimate:
    """What the search compares.

    Attributes:
        exact: whether the whole step was dry-run, and its allocations replayed.
        bytes: of the device; without fragmentation unless ``exact``.
        tensors: the part of them that is neither overhead nor fragmentation.
        host_bytes: of host memory, where that is another than the device's.
        activations: the part of ``tensors`` that passes keep, at the peak.
        computing, updating: seconds of the kernels of all passes, and of the optimizer phase; 0 unless composed.
        retries: times in a step that the allocator empties its cache to make room.
        note: where the memory is exceeded, or what the allocator meets.
    """

    strategy: Strategy
    exact: bool
    bytes: int
    tensors: int
    activations: int
    host_bytes: int
    seconds: float
    split: Mapping[str, float]
    computing: float = 0.0
    updating: float = 0.0
    retries: int = 0
    note: str = ""


@dataclass
class Verdicts:
    """The candidates of one recipe on one cluster, each with its verdict."""

    recipe: Recipe
    cluster: Cluster
    candidates: dict[Strategy, Candidate] = field(default_factory=dict)

    @property
    def reserve_bytes(self) -> int:
        """The part of the capacity that stays free."""
        return int(self.cluster.device.traits.reserve * self.cluster.capacity_bytes)

    @property
    def budget_bytes(self) -> int:
        """Device memory that a strategy may use."""
        return self.cluster.capacity_bytes - self.reserve_bytes

    @property
    def by_memory(self) -> bool:
        """Whether the recipe asks for the least memory instead of the least time."""
        return self.recipe.plan.objective == "memory"

    def exact(self, prediction: Prediction) -> Estimate:
        """The figures of a prediction."""
        ledger = prediction.peak.ledger
        step = prediction.step
        note = prediction.in_words()
        if (over := prediction.sum_bytes - self.budget_bytes) > 0:
            where = moment(prediction.peak.phase, prediction.peak.where)
            note = f"{format_bytes(over)} too much {where}"
        return Estimate(
            prediction.strategy,
            True,
            ledger.total,
            ledger.total - ledger.overhead - ledger.fragmentation,
            ledger.activations,
            prediction.host.total,
            step.seconds,
            step.split,
            retries=prediction.retries,
            note=note,
        )

    def fits(self, estimate: Estimate) -> bool:
        """Whether the device's and the host's memory suffice, before fragmentation where it is not known."""
        return estimate.bytes <= self.budget_bytes and self._host_excess(estimate) <= 0

    def _host_excess(self, estimate: Estimate) -> int:
        """Bytes beyond the rank's share of host memory; negative when there is room."""
        return estimate.host_bytes - self.cluster.host_capacity_bytes

    def judge(self, estimate: Estimate) -> None:
        """Record a candidate with its verdict."""
        verdict = "tight" if estimate.retries else "fits"
        reason = estimate.note
        if (over := estimate.bytes - self.budget_bytes) > 0:
            verdict = "does not fit"
            reason = estimate.note or f"{format_bytes(over)} too much"
        elif (excess := self._host_excess(estimate)) > 0:
            verdict = "does not fit"
            reason = f"{format_bytes(excess)} too much in host memory"
        peak_is: PeakIs = "counted" if estimate.exact or not self._fragments else "estimated"
        if peak_is == "estimated" and verdict == "does not fit":
            peak_is = "at least"
        figures = estimate.bytes, estimate.seconds, verdict, reason, peak_is, estimate.split
        self._record(estimate.strategy, *figures)

    @property
    def _fragments(self) -> bool:
        """Whether the device's allocator keeps freed memory."""
        return TARGET_KERNELS[self.cluster.device.kind].caches

    def exclude(self, strategy: Strategy, least: int) -> None:
        """Record a candidate that a lower bound of its memory excludes."""
        reason = f"weights, optimizer state and a step's samples alone take at least {format_bytes(least)}"
        self._record(strategy, least, 0.0, "does not fit", reason, "at least", {})

    def fail(self, strategy: Strategy, error: Exception) -> None:
        """Record a candidate whose dry run raised an error."""
        reason = printable(f"{type(error).__name__}: {error}")
        self._record(strategy, 0, 0.0, UNKNOWN, reason, "counted", {})

    def best_so_far(self) -> Iterator[str]:
        """The best of those that fit, in words."""
        fitting = (candidate for candidate in self.candidates.values() if candidate.verdict == "fits")
        best = min(fitting, key=lambda c: c.peak_bytes if self.by_memory else c.step_seconds, default=None)
        if best is not None:
            yield f"best so far {best.line}, {format_seconds(best.step_seconds)}, {format_bytes(best.peak_bytes)}"

    def _record(
        self,
        strategy: Strategy,
        peak: int,
        seconds: float,
        verdict: str,
        reason: str,
        peak_is: PeakIs,
        split: Mapping[str, float],
    ) -> None:
        line = strategy_line(strategy, layout_of(strategy, self.cluster.world_size), self.recipe.batch_size)
        self.candidates[strategy] = Candidate(strategy, line, peak, seconds, verdict, reason, peak_is, split)
