"""``shardwise plan --limits``: how far each quantity goes at the plan's strategy, all else equal.

Quick predictions bracket the last value that fits. Full dry runs of it and of the next value then decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardwise.core.answer import QuantityLimit
from shardwise.core.collector import frozen
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Candidate, Plan
from shardwise.core.progress import Progress, silent
from shardwise.core.strategy import Setting, Strategy
from shardwise.core.units import format_bytes
from shardwise.hardware.cluster import Cluster, cluster_of
from shardwise.model.blueprint import Blueprint
from shardwise.model.open import blueprint_of
from shardwise.planner.predictor import Predictor
from shardwise.recipe.checks import MOST_TOKENS
from shardwise.recipe.cluster_sizes import resized, sizes
from shardwise.recipe.data_sections import MOST_LENGTH
from shardwise.recipe.sections import Recipe
from shardwise.technique import MICRO_BATCH_SIZE, ORDER, broken_rules, case_of, stages_of

DEEPER = 16
"""So many times the model's blocks are tried at most: a full dry run goes through each of them."""

_PARTS = (16, 8, 4, 2, 1)
"""A sequence is varied by the first of these parts of its length that every rule allows."""

_MORE_NODES = 64
"""Where nothing fits, so many times the cluster's nodes are tried."""

_INTERPOLATED = 4
"""Trials that assume memory to grow in proportion, before the range is halved."""

_Trial = tuple[Predictor, Strategy]


@dataclass(frozen=True)
class _Range:
    """A quantity's values, by indices from 1: a larger index needs more memory.

    Attributes:
        now: the index of the plan's value.
        most: the largest index.
        end: what ends the range there.
        value: of an index.
        trial: what predicts a value.
        note: what goes with a value.
    """

    quantity: str
    now: int
    most: int
    end: str
    value: Callable[[int], Any]
    trial: Callable[[Any], _Trial]
    note: Callable[[Any], str] = field(default=lambda value: "")


def limits_of(
    recipe: Recipe, cluster: Cluster, plan: Plan, progress: Progress = silent
) -> tuple[QuantityLimit, ...]:
    """The largest micro-batch, sequence and depth, and the fewest devices, at a plan's strategy."""
    pinned = recipe.model_copy(update={"strategy": dict(plan.strategy.values)})
    with frozen():
        return tuple(
            _LimitSearch(varied, plan, progress).limit() for varied in _ranges(pinned, cluster, plan)
        )


# -- the quantities -----------------------------------------------------------------------------------


def _ranges(recipe: Recipe, cluster: Cluster, plan: Plan) -> Iterator[_Range]:
    blueprint = blueprint_of(recipe)
    size = plan.strategy[MICRO_BATCH_SIZE]
    length = recipe.data.sequence_length
    trial = partial(_trial, cluster=cluster)
    yield _micro_batches(recipe, blueprint, cluster, plan)
    if recipe.model.factory is None:
        native = recipe.model.hf is None
        most = min(MOST_LENGTH, MOST_TOKENS // size)
        if not native and blueprint.context is not None:
            most = min(most, blueprint.context)
        part = next(part for part in _PARTS if length % part == 0 and _allows(recipe, plan, length // part))
        step = length // part
        yield _Range(
            "sequence_length",
            part,
            max(part, most // step),
            "the model's context ends there" if not native else "a recipe has no longer one",
            lambda index: index * step,
            lambda value: trial(_with_length(recipe, value), plan.strategy),
        )
        if native and blueprint.depth is not None:
            stages = stages_of(plan.strategy)
            layers = stages if blueprint.depth % stages == 0 else 1
            yield _Range(
                "layers",
                blueprint.depth // layers,
                DEEPER * blueprint.depth // layers,
                f"{DEEPER} times the model's are the most that is tried",
                lambda index: index * layers,
                lambda value: trial(_with_model(recipe, layers=value), plan.strategy),
            )
    case = case_of(plan.strategy, plan.world_size, recipe)
    for technique in ORDER:
        for setting in technique.settings:
            if setting.step > 0 and technique.has_effect(setting, case):
                yield _setting_range(setting, recipe, plan, trial)
    yield _device_range(recipe, blueprint, cluster, plan)


def _setting_range(
    setting: Setting[Any], recipe: Recipe, plan: Plan, trial: Callable[[Recipe, Strategy], _Trial]
) -> _Range:
    """A setting's values from its minimum on, in its steps."""
    least, now, most = (
        round(value / setting.step)
        for value in (setting.minimum or 0, plan.strategy[setting], setting.maximum or 0)
    )

    def value(index: int) -> float:
        return round((least + index - 1) * setting.step, 9)

    return _Range(
        setting.key,
        now - least + 1,
        most - least + 1,
        "a recipe has no larger one",
        value,
        lambda number: trial(recipe, plan.strategy.with_values(**{setting.key: number})),
    )


def _micro_batches(recipe: Recipe, blueprint: Blueprint, cluster: Cluster, plan: Plan) -> _Range:
    """The batch grows where a rank's share of it is smaller than the micro-batch."""
    base = Predictor(recipe, blueprint, cluster)
    ranks = plan.layout.data_degree

    def trial(size: int) -> _Trial:
        strategy = plan.strategy.with_values(**{MICRO_BATCH_SIZE.key: size})
        if size * ranks <= recipe.batch_size:
            return base, strategy
        larger = recipe.model_copy(update={"batch_size": size * ranks})
        return Predictor(larger, blueprint, cluster), strategy

    def note(size: int) -> str:
        return f"batch_size {size * ranks:,}" if size * ranks > recipe.batch_size else ""

    most = max(plan.strategy[MICRO_BATCH_SIZE], MOST_TOKENS // recipe.data.sequence_length)
    end = "a recipe has no larger one"
    now = plan.strategy[MICRO_BATCH_SIZE]
    return _Range(MICRO_BATCH_SIZE.key, now, most, end, lambda index: index, trial, note)


def _device_range(recipe: Recipe, blueprint: Blueprint, cluster: Cluster, plan: Plan) -> _Range:
    """Fewer devices need more memory of each. Where the plan does not fit, more are tried too."""
    most = cluster.nodes if plan.fits else _MORE_NODES * cluster.nodes
    by_number = {nodes * node: (nodes, node) for nodes, node in sizes(cluster, most)}
    numbers = sorted(by_number, reverse=True)

    def trial(number: int) -> _Trial:
        asked = resized(recipe, cluster, by_number[number])
        return Predictor(asked, blueprint, cluster_of(asked.cluster)), plan.strategy

    now = numbers.index(cluster.world_size) + 1
    return _Range("devices", now, len(numbers), "one is enough", lambda index: numbers[index - 1], trial)


def _trial(recipe: Recipe, strategy: Strategy, *, cluster: Cluster) -> _Trial:
    return Predictor(recipe, blueprint_of(recipe), cluster), strategy


def _allows(recipe: Recipe, plan: Plan, length: int) -> bool:
    return not any(broken_rules(plan.strategy, plan.world_size, _with_length(recipe, length)))


def _with_length(recipe: Recipe, length: int) -> Recipe:
    """The recipe with sequences of another length. The context of a native model grows with them."""
    data = recipe.data.model_copy(update={"sequence_length": length})
    longer = recipe.model_copy(update={"data": data})
    context = blueprint_of(recipe).context if recipe.model.hf is None else None
    return longer if context is None or length <= context else _with_model(longer, context=length)


def _with_model(recipe: Recipe, **dimensions: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=dimensions)})


# -- the search ---------------------------------------------------------------------------------------


@dataclass
class _LimitSearch:
    """The predictions of one quantity, by index."""

    range: _Range
    plan: Plan
    progress: Progress
    _full: dict[int, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        verdict = "does not fit"
        if plan.fits:
            verdict = "tight" if plan.tight else "fits"
        here = Candidate(plan.strategy, plan.line, plan.peak.bytes, plan.step.seconds, verdict, plan.verdict)
        self._full[self.range.now] = here

    def limit(self) -> QuantityLimit:
        varied = self.range
        last = self._last_by_quick()
        while last and not self._fits(last):
            last -= 1
        while last < varied.most and self._fits(last + 1):
            last += 1
        value = varied.value(last) if last else None
        peak = self._in_full(last).peak_bytes if last else 0
        note = varied.note(value) if value is not None else ""
        if last == varied.most:
            return QuantityLimit(
                varied.quantity, varied.value(varied.now), value, peak, None, 0, varied.end, note
            )
        stop = self._in_full(last + 1)
        now, stops = varied.value(varied.now), varied.value(last + 1)
        return QuantityLimit(
            varied.quantity, now, value, peak, stops, stop.peak_bytes, self._need(stop), note
        )

    def _last_by_quick(self) -> int:
        """The largest index that fits by quick predictions; 0 if none does."""
        low = 0
        high = self.range.now
        low_bytes = 0
        high_bytes = self.plan.peak.bytes
        if self.plan.fits:
            low, low_bytes = high, high_bytes
            while True:
                if low == self.range.most:
                    return low
                high = min(2 * low, self.range.most)
                high_bytes, fits = self._quick(high)
                if not fits:
                    break
                low, low_bytes = high, high_bytes
        trials = 0
        while high - low > 1:
            middle = (low + high) // 2
            if trials < _INTERPOLATED and high_bytes > low_bytes:
                room = self._budget - low_bytes
                middle = low + int((high - low) * room / (high_bytes - low_bytes))
                middle = max(low + 1, min(high - 1, middle))
            size, fits = self._quick(middle)
            low, low_bytes = (middle, size) if fits else (low, low_bytes)
            high, high_bytes = (high, high_bytes) if fits else (middle, size)
            trials += 1
        return low

    def _quick(self, index: int) -> tuple[int, bool]:
        """A peak with as much fragmentation as the plan's, and whether it fits."""
        candidate, replayed = self._predicted(index, quick=True)
        tensors = self.plan.peak.bytes - self.plan.ledger.fragmentation
        size = candidate.peak_bytes if replayed else candidate.peak_bytes * self.plan.peak.bytes // tensors
        return size, candidate.verdict == "fits" and size <= self._budget

    def _fits(self, index: int) -> bool:
        """Whether a full dry run fits as well as the plan does, which may be tight itself."""
        return self._in_full(index).verdict in (("fits", "tight") if self.plan.tight else ("fits",))

    def _in_full(self, index: int) -> Candidate:
        if index not in self._full:
            self._full[index] = self._predicted(index, quick=False)[0]
        return self._full[index]

    def _predicted(self, index: int, *, quick: bool) -> tuple[Candidate, bool]:
        """A candidate, and whether its peak has its fragmentation. An impossible one is invalid."""
        value = self.range.value(index)
        self.progress(f"{self.range.quantity} {value:,}")
        predictor, strategy = self.range.trial(value)
        broken = broken_rules(strategy, predictor.cluster.world_size, predictor.recipe)
        if not (reason := next((violation.rule.reason for violation in broken), "")):
            try:
                if quick:
                    predictor.estimate(strategy, alone=True)
                else:
                    predictor.confirm(strategy)
                candidate = predictor.candidates[strategy]
                return candidate, candidate.peak_is == "counted"
            except RecipeError as error:
                reason = error.what
        return Candidate(strategy, "", 0, 0.0, "invalid", reason), True

    def _need(self, candidate: Candidate) -> str:
        """What keeps a value from fitting."""
        needs, there = format_bytes(candidate.peak_bytes), format_bytes(self.plan.capacity_bytes)
        if candidate.verdict == "invalid":
            return f"is not possible: {candidate.reason}"
        if candidate.peak_bytes > self.plan.capacity_bytes:
            return f"needs {needs} of {there}"
        if candidate.peak_bytes > self._budget:
            return f"needs {needs} of {there}, with a reserve of {format_bytes(self.plan.reserve_bytes)}"
        # Host memory is too small, or the allocator has to make room.
        return f"{candidate.verdict.replace('tight', 'is tight')}: {candidate.reason}"

    @property
    def _budget(self) -> int:
        return self.plan.capacity_bytes - self.plan.reserve_bytes
