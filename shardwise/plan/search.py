"""Choosing a strategy: the smallest departure from plain data parallelism that fits, in as few passes as fit.

Every setting lists its own candidates, cheapest in time first (core/strategy.py); the search walks their
product in that order, so it names no technique. For each it takes the largest micro-batch that fits, and of a pipeline,
whose ranks wait for each other the less the more micro-batches there are, a smaller one while that is faster. What
cannot fit by the lower bound is not dry-run at all; the rest is ranked by quick predictions, and the
winner is confirmed by a full dry run, whose allocations are replayed to the device's allocator. One that would
run only by emptying the allocator's cache in every step, for which the device stops, is taken when nothing else fits.

This is the search of a first version: it takes the first that fits instead of timing all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from shardwise.core import scaling
from shardwise.core.cluster import Cluster
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Candidate, Plan, TimelinePoint
from shardwise.core.recipe import Recipe
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes
from shardwise.model.blueprint import Blueprint
from shardwise.plan.least import least_state_bytes
from shardwise.plan.predict import Prediction, predict
from shardwise.plan.sentences import assumptions, offload_in_words
from shardwise.plan.stages import EVERY_RANK, predict_worst
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    SETTINGS,
    broken_rules,
    emulated,
    layout_of,
    micro_batches,
    native,
    one_line,
    refuse_broken,
    refuse_unsupported,
    strategy_from,
)

RESERVE: Mapping[str, float] = {"cpu": 0.0, "cuda": 0.02, "rocm": 0.02}
"""Share of the capacity that is left for what neither the dry run nor the replayed allocator sees: memory that
kernels take for the time they run (the fp32 sums of flash attention's backward pass: 128 MiB for 8,192 tokens of
4,096 channels) and the spread of the context and communicators, which are from tables."""

MOST_PER_PARAMETER = 64
"""Bytes of weights and optimizer state that nothing takes for a parameter: where even they fit, no bound is counted."""


@dataclass
class Search:
    """One search: what is asked, and everything that was looked at on the way.

    Attributes:
        compare: whether to predict what one change of the chosen strategy would cost, which takes most of the time.
    """

    recipe: Recipe
    blueprint: Blueprint
    cluster: Cluster
    compare: bool = True
    seen: dict[Strategy, Candidate] = field(default_factory=dict)
    replayed: dict[Strategy, bool] = field(default_factory=dict)
    quick: dict[tuple[Strategy, int], Prediction] = field(default_factory=dict)
    tight: Prediction | None = None

    @property
    def _reserve(self) -> float:
        return RESERVE[self.cluster.device.kind]

    @property
    def reserve_bytes(self) -> int:
        return int(self._reserve * self.cluster.capacity_bytes)

    @property
    def budget_bytes(self) -> int:
        """What a strategy may need."""
        return self.cluster.capacity_bytes - self.reserve_bytes

    def run(self) -> Plan:
        """The plan. Raises RecipeError when what is pinned breaks a rule."""
        refuse_broken(self.recipe, self.cluster.world_size, lambda key: f"strategy.{key}")
        refuse_unsupported(self.recipe.strategy, self.cluster.device, lambda key: f"strategy.{key}")
        best: Prediction | None = None
        for strategy in self._strategies():
            found = self._that_fits(strategy)
            if found is not None:
                best = found
                break
        best = best or self.tight
        if best is None:
            least = min(
                (c for c in self.seen.values() if c.verdict == "does not fit"), key=lambda c: c.peak_bytes
            )
            best = self._predict(least.strategy, quick=False)
        return self._plan(best)

    # -- what is tried ------------------------------------------------------------------------------

    def _strategies(self) -> Iterator[Strategy]:
        """Every combination of candidates of settings that are not pinned, preferred first."""
        pinned = self.recipe.strategy
        free = [s for s in SETTINGS if s.candidates and s.key not in pinned]
        for values in product(*(s.candidates for s in free)):
            strategy = strategy_from({**pinned, **{s.key: v for s, v in zip(free, values, strict=True)}})
            if not any(broken_rules(strategy, self.cluster.world_size, self.recipe)):
                yield strategy

    def _sizes(self, strategy: Strategy) -> list[int]:
        """Micro-batch sizes to try, largest first: the rank's share of the batch in 1, 2, 4, ... passes."""
        if MICRO_BATCH_SIZE.key in self.recipe.strategy:
            return [strategy[MICRO_BATCH_SIZE]]
        layout = layout_of(strategy, self.cluster.world_size)
        share = -(-self.recipe.batch_size // (layout.degree("replicate") * layout.degree("shard")))
        passes, sizes = 1, []
        while True:
            size = -(-share // passes)
            sizes.append(size)
            if size == 1:
                return list(dict.fromkeys(sizes))
            passes *= 2

    def _that_fits(self, strategy: Strategy) -> Prediction | None:
        """With the largest micro-batch that fits, or a faster one."""
        sizes = self._sizes(strategy)
        if not self._may_fit(strategy.with_values(micro_batch_size=sizes[-1])):
            return None
        for index, size in enumerate(sizes):
            trial = strategy.with_values(micro_batch_size=size)
            quick = self._predict(trial, quick=True)
            if quick.sum_bytes > self.budget_bytes or self._host_excess(quick) > 0:
                continue
            full = self._predict(trial, quick=False)
            if full.peak.bytes <= self.budget_bytes and self._host_excess(full) <= 0:
                if full.retries == 0:
                    return self._faster(quick, sizes[index + 1 :]) or full
                self.tight = self.tight or full
        return None

    def _faster(self, quick: Prediction, smaller: Sequence[int]) -> Prediction | None:
        """A pipeline that fits with a smaller micro-batch, while each is faster than the one before by its ``quick``
        prediction."""
        best = quick
        for size in smaller if quick.pipeline is not None else ():
            found = self._predict(quick.strategy.with_values(micro_batch_size=size), quick=True)
            if found.step.seconds >= best.step.seconds:
                break
            best = found
        if best is quick:
            return None
        full = self._predict(best.strategy, quick=False)
        fits = full.peak.bytes <= self.budget_bytes and self._host_excess(full) <= 0
        return full if fits and full.retries == 0 else None

    def tried(self, strategy: Strategy) -> Candidate:
        """A strategy with the largest micro-batch that fits, by quick predictions, or else with the smallest."""
        sizes = self._sizes(strategy)
        trials = [strategy.with_values(micro_batch_size=size) for size in sizes]
        if not self._may_fit(trials[-1]):
            return self.seen[trials[-1]]

        def fits(trial: Strategy) -> bool:
            self._predict(trial, quick=True)
            return self.seen[trial].verdict == "fits"

        index = min(bisect_left(trials, True, key=fits), len(trials) - 1)
        fits(trials[index])
        return self.seen[trials[index]]

    def confirmed(self, candidate: Candidate) -> Candidate:
        """The same by a full dry run, with what the allocator loses; tight where it has to empty its cache for it."""
        found = self._predict(candidate.strategy, quick=False)
        confirmed = self.seen[candidate.strategy]
        return (
            replace(confirmed, verdict="tight")
            if confirmed.verdict == "fits" and found.retries
            else confirmed
        )

    def _host_excess(self, found: Prediction) -> int:
        """Bytes that a rank's share of the host's memory is too small by; negative where there is room."""
        return found.host.total - self.cluster.host_capacity_bytes

    def _may_fit(self, strategy: Strategy) -> bool:
        """Whether the lower bound leaves room; records the candidate when it does not."""
        layout, counts = layout_of(strategy, self.cluster.world_size), self.blueprint.parameter_counts()
        if sum(counts) * MOST_PER_PARAMETER <= self.budget_bytes:
            return True
        least = least_state_bytes(counts, strategy, layout, self.recipe, self.cluster)
        if least <= self.budget_bytes:
            return True
        reason = f"weights and optimizer state alone take at least {format_bytes(least)}"
        self._note(strategy, least, 0.0, "does not fit", reason)
        return False

    # -- what is remembered -------------------------------------------------------------------------

    def _predict(self, strategy: Strategy, *, quick: bool, ranks: Sequence[int] | None = None) -> Prediction:
        budget = self.budget_bytes
        found = predict_worst(
            self.recipe,
            self.blueprint,
            strategy,
            self.cluster,
            quick=quick,
            budget=budget,
            ranks=ranks,
            seen=self.quick,
        )
        over = found.peak.bytes - budget
        verdict, reason = "fits", found.in_words()
        if over > 0:
            verdict, where = "does not fit", f" at {found.peak.where}" if found.peak.where else ""
            if found.sum_bytes > budget:
                reason = f"{format_bytes(found.sum_bytes - budget)} too much in the {found.peak.phase} phase{where}"
        elif (excess := self._host_excess(found)) > 0:
            verdict, reason = "does not fit", f"{format_bytes(excess)} too much in host memory"
        self._note(strategy, found.peak.bytes, found.step.seconds, verdict, reason)
        self.replayed[strategy] = found.run.replay is not None
        return found

    def _note(self, strategy: Strategy, peak: int, seconds: float, verdict: str, reason: str) -> None:
        layout = layout_of(strategy, self.cluster.world_size)
        line = one_line(strategy, layout, self.recipe.batch_size)
        self.seen[strategy] = Candidate(strategy, line, peak, seconds, verdict, reason)

    # -- the result ---------------------------------------------------------------------------------

    def _plan(self, chosen: Prediction) -> Plan:
        if self.compare:
            self._look_at_neighbours(chosen)
        layout, strategy = chosen.layout, chosen.strategy
        candidates = [self._judged(c, chosen) for c in self.seen.values()]
        candidates.sort(
            key=lambda c: (c.verdict != "chosen", c.verdict != "fits", c.step_seconds, c.peak_bytes)
        )
        return Plan(
            strategy=strategy,
            line=one_line(strategy, layout, self.recipe.batch_size),
            world_size=self.cluster.world_size,
            cluster=self.cluster.name,
            device=self.cluster.device.name,
            capacity_bytes=self.cluster.capacity_bytes,
            reserve_bytes=self.reserve_bytes,
            parameters=chosen.parameters,
            peak=chosen.peak,
            worst_rank=chosen.rank,
            allocated_bytes=self._allocated(chosen),
            step=chosen.step,
            micro_batches=micro_batches(strategy, layout, self.recipe.batch_size),
            candidates=tuple(candidates),
            reasons=(*self._reasons(chosen), *scaling.sentences(self.recipe)),
            assumptions=(*assumptions(self.cluster, self._reserve), *emulated(strategy, self.cluster.device)),
            timeline=tuple(TimelinePoint(s.phase, s.ledger) for s in chosen.run.timeline),
            host=chosen.host,
            host_capacity_bytes=self.cluster.host_capacity_bytes,
            disk_bytes=chosen.disk_bytes,
            layout=layout,
            devices_per_node=self.cluster.devices_per_node,
            pipeline=chosen.pipeline,
        )

    def _allocated(self, chosen: Prediction) -> dict[int, int]:
        """Predicted peak by rank in the measurement's terms, of the first of those that hold the same."""
        world = self.cluster.world_size
        predicted = {chosen.rank: chosen.allocated_bytes, **chosen.allocated_by_rank}
        if not chosen.run.even and world <= EVERY_RANK:
            for rank in set(range(world)) - predicted.keys():
                run = predict(self.recipe, self.blueprint, chosen.strategy, self.cluster, rank=rank)
                predicted[rank] = run.allocated_bytes
        return predicted

    def _worst_of(self, strategy: Strategy, chosen: Prediction) -> list[int] | None:
        """The rank to look at of a neighbour with the same ranks: the chosen one's worst."""
        same = layout_of(strategy, self.cluster.world_size) == chosen.layout
        return [chosen.rank] if same and chosen.run.pipeline is not None else None

    def _look_at_neighbours(self, chosen: Prediction) -> None:
        """Predict what one change of one setting would cost."""
        strategy = chosen.strategy
        size = strategy[MICRO_BATCH_SIZE]
        changes: list[Mapping[str, object]] = [
            {s.key: value} for s in SETTINGS for value in (*s.candidates, *s.compared) if value != strategy[s]
        ]
        sizes = self._sizes(strategy.with_values(micro_batch_size=size))
        changes += [{MICRO_BATCH_SIZE.key: near} for near in sizes if size // 2 <= near <= 2 * size + 1]
        for change in changes:
            neighbour = strategy.with_values(**change)
            broken = any(broken_rules(neighbour, self.cluster.world_size, self.recipe))
            if broken or neighbour in self.seen or not native(neighbour, self.cluster.device):
                continue
            # One that cannot be built here, for a package that is missing, is not shown.
            with suppress(RecipeError):
                if self._may_fit(neighbour):
                    self._predict(neighbour, quick=True, ranks=self._worst_of(neighbour, chosen))

    def _judged(self, candidate: Candidate, chosen: Prediction) -> Candidate:
        """The candidate with its final verdict, and a reason in comparison with the chosen one."""
        if candidate.strategy == chosen.strategy:
            fits = chosen.peak.bytes <= self.budget_bytes and self._host_excess(chosen) <= 0
            verdict = "chosen" if fits else "does not fit"
            return replace(candidate, verdict=verdict)
        if candidate.verdict == "fits" and not self.replayed[candidate.strategy]:
            candidate = self._fragmented(candidate, chosen)
        if candidate.verdict != "fits":
            return candidate
        time = candidate.step_seconds / chosen.step.seconds - 1
        memory = candidate.peak_bytes - chosen.peak.bytes
        sign = "+" if memory >= 0 else "-"
        reason = f"{time:+.0%} step time, {sign}{format_bytes(abs(memory))}"
        if candidate.reason:
            reason += f"; {candidate.reason}"
        return replace(candidate, reason=reason)

    def _fragmented(self, candidate: Candidate, chosen: Prediction) -> Candidate:
        """The candidate with fragmentation as large, for its size, as the chosen one's."""
        peak = (
            candidate.peak_bytes * chosen.peak.bytes // (chosen.peak.bytes - chosen.peak.ledger.fragmentation)
        )
        over = peak - self.budget_bytes
        if over > 0:
            reason = (
                f"{format_bytes(over)} too much, if as much is lost to fragmentation as in the chosen one"
            )
            return replace(candidate, peak_bytes=peak, verdict="does not fit", reason=reason)
        return replace(candidate, peak_bytes=peak)

    def _is_smaller_than_fits(self, chosen: Prediction) -> bool:
        """Whether a pipeline was given a smaller micro-batch than the largest that fits."""
        size = chosen.strategy[MICRO_BATCH_SIZE]
        larger = (
            set(chosen.strategy.differences(candidate.strategy)) == {MICRO_BATCH_SIZE.key}
            and candidate.strategy[MICRO_BATCH_SIZE] > size
            and candidate.verdict == "fits"
            for candidate in self.seen.values()
        )
        return chosen.pipeline is not None and any(larger)

    def _reasons(self, chosen: Prediction) -> Iterator[str]:
        """Why this strategy and not one that the search prefers, or one more."""
        yield from chosen.run.notes
        if words := chosen.in_words():
            yield words
        yield from offload_in_words(chosen, self.cluster)
        for candidate in self.seen.values():
            if candidate.verdict == "does not fit" and candidate.strategy != chosen.strategy:
                changed = chosen.strategy.differences(candidate.strategy)
                if len(changed) == 1:
                    [(key, (mine, theirs))] = changed.items()
                    yield f"{key} {mine}, because {key} {theirs} needs at least {format_bytes(candidate.peak_bytes)}"
        free = [
            s.key
            for s in SETTINGS
            if s.key not in self.recipe.strategy and (s.candidates or s is MICRO_BATCH_SIZE)
        ]
        if free and chosen.peak.bytes <= self.budget_bytes:
            size = "fastest" if self._is_smaller_than_fits(chosen) else "largest"
            yield f"chosen by the planner: {', '.join(free)}; the first that fits, plainest first, {size} micro-batch"


def plan_for(recipe: Recipe, blueprint: Blueprint, cluster: Cluster, *, compare: bool = True) -> Plan:
    """Check what the recipe pins and choose the rest.

    With ``compare`` the plan's candidates hold what one change of the chosen strategy would cost, too.

    Raises:
        RecipeError: when pinned settings break a rule.
    """
    return Search(recipe, blueprint, cluster, compare).run()
