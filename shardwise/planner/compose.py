"""Memory and time of a strategy, composed from shallow dry runs of others.

A step has parts (technique/base.py): where the states are, what blocks keep for the backward pass, the loss. Changes by
techniques of two parts add up. So the *origin* of a strategy, which has only the settings of every part, is
counted, and the origin with each part alone; the strategy is the origin plus the change by each part:

    F = origin + (states alone - origin) + (activations alone - origin) + (loss alone - origin)

It is taken for each kind of micro-batch, for the calls and for the highest moment of every block in every phase
(planner/counts.py). A search over 4 stages of ZeRO x 3 kinds of recomputation x 2 losses makes 9 dry runs for each
point instead of 24. A full dry run of the chosen strategy decides (planner/search.py): a composed figure only proposes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.core.cost import Collective
from shardwise.core.ledger import Ledger, ledger_from
from shardwise.core.strategy import Layout, Strategy
from shardwise.dryrun.moments import LEDGER_ROWS, Bytes
from shardwise.engine.phase import PHASES as ALL_PHASES
from shardwise.hardware.cluster import Cluster
from shardwise.planner.counts import (
    ACTIVATIONS_ROW,
    REST,
    Counting,
    Counts,
    LinearCounts,
    NotComposable,
    NotLinear,
    Point,
)
from shardwise.planner.timing import (
    PASS_PHASES,
    TIME_COLUMNS,
    CollectiveCalls,
    StepTime,
    add_call,
    collective_seconds,
    combined_time,
)
from shardwise.technique import MICRO_BATCH_SIZE, OF_BLOCKS, PARTS, STATES, within

SHALLOW = 4
"""Blocks of the shallower model: the first and the last differ from those between them, and what these hold in the
backward pass is linear in their number, so its largest is at the second or at the last but one. Where weights are
sharded and blocks recomputed, a model of 12 extrapolated from 2 and 3 had 67 % too much, and from 4 and 5 its own."""

ROLES = 3
"""Micro-batches of a dry run: the first, one like all others, and the last (engine/forward_backward.py)."""

_PHASES: tuple[str, ...] = (*PASS_PHASES, *(phase for phase in ALL_PHASES if phase not in PASS_PHASES))
_KINDS: tuple[int, ...] = (REST, 0, 2, 1)
"""The step outside of micro-batches; its first micro-batch, its last, and all others."""

_STATE_ROWS = [LEDGER_ROWS.index(r) for r in ("parameters", "master_weights", "gradients", "optimizer_state")]

Floats = npt.NDArray[np.float64]


def least_depth(period: int, first: int) -> int:
    """The fewest blocks of a shallower model. Its first ones are in the half that is numbered from the first."""
    return max(first + max(SHALLOW, period + 2), 2 * first + 1)


class Share(NamedTuple):
    """Of a whole model's step, what one rank does and holds.

    Attributes:
        work: the share of the passes.
        states, activations: the share of weights, gradients and optimizer state, and of the activations.
        longer: by how much the passes take longer because ranks wait for each other.
        updates: the share of the other phases' kernels, such as those of the optimizer.
        layout: the mesh on which its collectives take place; None for the strategy's own.
    """

    work: float = 1.0
    states: float = 1.0
    activations: float = 1.0
    longer: float = 1.0
    updates: float = 1.0
    layout: Layout | None = None


@dataclass(frozen=True)
class Composed:
    """What rank 0 of a strategy holds at its highest moment, and does in a step.

    Attributes:
        ledger: without the device's overhead, and without fragmentation.
        moment: the phase and the block of the highest moment.
        computing, updating: seconds of the kernels of the passes, and of the optimizer phase.
    """

    ledger: Ledger
    moment: str
    host: Ledger
    disk_bytes: int
    time: StepTime
    computing: float
    updating: float
    communicators: int


class _Term(NamedTuple):
    """Counts at a depth and a size of micro-batch, with their sign in the sum."""

    sign: int
    counts: LinearCounts
    depth: int
    size: int


class _Work(NamedTuple):
    """What a term does: seconds by [kind of micro-batch, phase, column], and calls of every collective by kind."""

    seconds: Floats
    calls: Mapping[int, Floats]


@dataclass
class StepComposer:
    """Composes strategies of one recipe on one cluster.

    Attributes:
        count: dry-runs a point.
        depth: blocks of the whole model.
        period: blocks after which kinds of blocks repeat themselves.
        first: blocks before those that do.
        sample_bytes: of one sequence.
    """

    count: Counting
    depth: int
    period: int
    first: int
    sample_bytes: int
    cluster: Cluster
    points: dict[Point, Counts] = field(default_factory=dict)
    _linear: dict[tuple[Strategy, int, int, int], LinearCounts] = field(default_factory=dict)
    _unlike: set[tuple[Strategy, int]] = field(default_factory=set)
    _numbers: dict[Collective, int] = field(default_factory=dict)
    _works: dict[tuple[LinearCounts, int, int], _Work] = field(default_factory=dict)
    _seconds: dict[tuple[Layout, int], float] = field(default_factory=dict)

    def composed(
        self, strategy: Strategy, layout: Layout, micro_batches: int, share: Share | None = None
    ) -> Composed:
        """The figures of one strategy, or of a rank that has a share of them. Raises NotComposable."""
        terms = self._terms(strategy, micro_batches, SHALLOW)
        deepest = max(term.counts.depth for term in terms)
        if terms[0].counts.depth < deepest:  # a part treats blocks in longer periods than the origin
            terms = self._terms(strategy, micro_batches, deepest)
        return self._figures(terms, strategy[MICRO_BATCH_SIZE], layout, micro_batches, share or Share())

    def alone(self, strategy: Strategy, layout: Layout, micro_batches: int) -> Composed:
        """The same figures of one strategy from dry runs of itself. Raises NotComposable."""
        size = strategy[MICRO_BATCH_SIZE]
        counts = self._known(_single(strategy), _run_of(micro_batches), size, SHALLOW)
        return self._figures([_Term(1, counts, self.depth, size)], size, layout, micro_batches, Share())

    def knows(self, strategy: Strategy) -> bool:
        """Whether the origin of a strategy has been counted."""
        origin = within(_single(strategy), None)
        return any(known == origin for known, *_ in self._linear)

    # -- which dry runs -----------------------------------------------------------------------------

    def wanted(self, strategy: Strategy, micro_batches: int) -> Iterator[Point]:
        """Points that ``composed`` takes where all is linear, so that they can be counted ahead."""
        size, single = strategy[MICRO_BATCH_SIZE], _single(strategy)
        origin, passes = within(single, None), _run_of(micro_batches)
        depth = self._least(SHALLOW, self.period)
        for part in (None, *PARTS):
            alone, runs = within(single, part), passes if part == STATES else 1
            if part is not None and alone == origin and runs == 1:
                continue
            yield Point(alone, depth, 1, runs)
            if depth < self.depth and (part is None or part in OF_BLOCKS):
                yield Point(alone, depth + self.period, 1, runs)
            if part != STATES and size > 1:
                yield Point(alone, depth, 2, runs)

    def _terms(self, strategy: Strategy, micro_batches: int, least: int) -> list[_Term]:
        """The origin's term, then for each part what it changes: its own term, less the origin's."""
        size, single, passes = strategy[MICRO_BATCH_SIZE], _single(strategy), _run_of(micro_batches)
        origin = within(single, None)
        plain = self._of_size(origin, size, least)
        terms = [_Term(1, plain, self.depth, size)]
        for part in PARTS:
            alone, depth, at = within(single, part), self.depth, size
            if part == STATES and (alone != origin or passes > 1):
                counts, at = self._known(alone, passes, plain.size, least), plain.size
            elif alone != origin:
                counts = self._of_size(alone, size, plain.depth, deep=part in OF_BLOCKS)
                if part not in OF_BLOCKS:  # a shallow model shows all that it changes
                    depth = counts.depth
            else:
                continue
            terms += [_Term(1, counts, depth, at), _Term(-1, plain, depth, at)]
        return terms

    def _of_size(self, strategy: Strategy, size: int, least: int, *, deep: bool = True) -> LinearCounts:
        """Counts that hold for this size: linear in the size from 1, else from 2, else of this size alone."""
        for start in (1, 2) if size > 2 else (1,):
            if start == size:
                break
            if (strategy, start) not in self._unlike:
                counts = self._known(strategy, 1, start, least, wide=True, deep=deep)
                try:
                    counts.require_linear()
                    return counts
                except NotLinear:
                    self._unlike.add((strategy, start))
                    self._linear[strategy, 1, start, least] = _with_points(counts, larger=None)
        return self._known(strategy, 1, size, least, deep=deep)

    def _known(
        self, strategy: Strategy, passes: int, size: int, least: int, *, wide: bool = False, deep: bool = True
    ) -> LinearCounts:
        """Counts from this size on; ``wide`` asks for a larger micro-batch, too, ``deep`` for more blocks."""
        key = (strategy, passes, size, least)
        known = self._linear.get(key) or self._base(strategy, passes, size, least)
        if deep and known.deeper is None and known.depth < self.depth:
            point = Point(strategy, known.depth + known.period, size, passes)
            known = _with_points(known, deeper=self._count(point))
        if wide and known.larger is None:
            known = _with_points(known, larger=self._count(Point(strategy, known.depth, 2 * size, passes)))
        self._linear[key] = known
        return known

    def _base(self, strategy: Strategy, passes: int, size: int, least: int) -> LinearCounts:
        """Counts of one point, whose blocks are repeated a whole number of times in the model."""
        depth = self._least(least, self.period)
        base = self._count(Point(strategy, depth, size, passes))
        if base.repeat_every == 0:
            raise NotComposable("how a block is treated depends on the depth of the model")
        period = int(np.lcm(base.repeat_every, self.period))
        deep_enough = self._least(max(least, base.min_depth), period)
        if deep_enough > depth:
            depth, base = deep_enough, self._count(Point(strategy, deep_enough, size, passes))
        return LinearCounts(base, depth, size, period)

    def _least(self, least: int, period: int) -> int:
        """The fewest blocks from which whole periods lead to the model: all kinds of blocks, and a neighbour."""
        least = max(least, least_depth(period, self.first))
        if period > self.period:
            least = max(least, self.first + SHALLOW * period)
        return min(least + (self.depth - least) % period, self.depth)

    def _count(self, point: Point) -> Counts:
        if point not in self.points:
            self.points[point] = self.count(point)
        return self.points[point]

    # -- the sum ------------------------------------------------------------------------------------

    def _figures(
        self, terms: Sequence[_Term], size: int, layout: Layout, count: int, share: Share
    ) -> Composed:
        rows, moment = _highest(terms, count, share)
        rows[ACTIVATIONS_ROW] += count * size * self.sample_bytes
        time, sums = self._time(terms, layout, count, share)
        return Composed(
            ledger=_ledger(rows),
            moment=moment,
            host=_ledger(sum(t.sign * t.counts.host(t.depth, t.size) for t in terms)),
            disk_bytes=max(0, sum(t.sign * t.counts.disk_bytes(t.depth) for t in terms)),
            time=replace(time, seconds=time.seconds + sum(time.passes.values()) * (share.longer - 1)),
            computing=sum(sum(sums[phase][:2]) for phase in PASS_PHASES if phase in sums),
            updating=sum(sums["optimizer"][:2]) if "optimizer" in sums else 0.0,
            communicators=max(term.counts.base.communicators for term in terms),
        )

    def _time(
        self, terms: Sequence[_Term], layout: Layout, count: int, share: Share
    ) -> tuple[StepTime, dict[str, list[float]]]:
        weights = np.array([1.0, 1.0, float(count > 1), float(max(0, count - 2))])  # as _KINDS
        seconds = np.zeros((len(_KINDS), len(_PHASES), TIME_COLUMNS))
        calls: dict[int, Floats] = {}
        for term in terms:
            work = self._work(term.counts, term.depth, term.size)
            seconds = seconds + term.sign * work.seconds
            for number, of_kind in work.calls.items():
                calls[number] = calls.get(number, 0.0) + term.sign * of_kind
        table = np.maximum(np.tensordot(weights, seconds, 1), 0.0)
        table[: len(PASS_PHASES)] *= share.work
        table[len(PASS_PHASES) :] *= share.updates
        sums = {phase: row for phase, row in zip(_PHASES, table.tolist(), strict=True) if any(row)}
        exchanges = list(self._exchanges(calls, layout, weights, share))
        time = combined_time({phase: [*row] for phase, row in sums.items()}, exchanges, count, self.cluster)
        return time, sums

    def _exchanges(
        self, calls: Mapping[int, Floats], layout: Layout, weights: Floats, share: Share
    ) -> Iterator[CollectiveCalls]:
        collectives = list(self._numbers)
        for number, counts in calls.items():
            total, collective = float(counts @ weights), collectives[number]
            if total > 0:
                passes = float((counts[1:] > 0) @ weights[1:]) or 1.0
                total *= share.work if collective.phase in PASS_PHASES else 1.0
                seconds = self._call_seconds(number, collective, layout, share.layout or layout)
                yield CollectiveCalls(collective, total, passes, seconds)

    def _call_seconds(self, number: int, collective: Collective, counted: Layout, mesh: Layout) -> float:
        """Seconds of one call on ``mesh``, where it was counted on another one."""
        key = (mesh, number)
        if key not in self._seconds:
            axis, degree = collective.axis, collective.degree
            if axis in counted:
                degree = degree * mesh.degree(axis) // counted.degree(axis)
            one = replace(collective, calls=1, degree=degree)
            self._seconds[key] = collective_seconds(one, mesh, self.cluster) if degree > 1 else 0.0
        return self._seconds[key]

    def _work(self, counts: LinearCounts, depth: int, size: int) -> _Work:
        key = (counts, depth, size)
        if key not in self._works:
            seconds, exchanged = np.zeros((len(_KINDS), len(_PHASES), TIME_COLUMNS)), dict[int, Floats]()
            for index, kind in enumerate(_KINDS):
                sums: dict[str, list[float]] = {}
                for call, calls in counts.calls_of(kind, depth, size).items():
                    if isinstance(call, Collective):
                        number = self._numbers.setdefault(call, len(self._numbers))
                        exchanged.setdefault(number, np.zeros(len(_KINDS)))[index] += calls
                    else:
                        add_call(sums, call, calls, self.cluster)
                for phase, row in sums.items():
                    seconds[index, _PHASES.index(phase)] = row
            self._works[key] = _Work(seconds, exchanged)
        return self._works[key]


def _single(strategy: Strategy) -> Strategy:
    return strategy.with_values(**{MICRO_BATCH_SIZE.key: 1})


def _run_of(micro_batches: int) -> int:
    """The micro-batches that a dry run needs for a step with this number of them."""
    return 1 if micro_batches == 1 else ROLES


def _with_points(counts: LinearCounts, **points: Counts | None) -> LinearCounts:
    """The same with another point, and nothing remembered."""
    deeper, larger = points.get("deeper", counts.deeper), points.get("larger", counts.larger)
    return LinearCounts(counts.base, counts.depth, counts.size, counts.period, deeper, larger)


def _ledger(rows: Any) -> Ledger:
    return ledger_from({row: max(0, int(size)) for row, size in zip(LEDGER_ROWS, rows, strict=True)})


def _highest(terms: Sequence[_Term], count: int, share: Share) -> tuple[Bytes, str]:
    """Bytes by row of the ledger, and the name, of the highest moment of all kinds of micro-batches."""
    weights = np.ones(len(LEDGER_ROWS))
    weights[_STATE_ROWS], weights[ACTIVATIONS_ROW] = share.states, share.activations
    best, rows, moment = -1.0, np.zeros(len(LEDGER_ROWS), dtype=np.int64), ""
    for role in (REST, 0, *([2] if count > 1 else []), *([1] if count > 2 else [])):
        names, levels = _levels(terms, role)
        if role != REST:  # of the micro-batches in flight all but the current one are whole at every moment
            activations, others = levels[:, ACTIVATIONS_ROW], max(0.0, 1 - share.work / share.activations)
            levels[:, ACTIVATIONS_ROW] = (1 - others) * activations + others * activations.max()
        totals = levels @ weights
        top = int(totals.argmax())
        if totals[top] > best:
            best, rows, moment = float(totals[top]), (levels[top] * weights).astype(np.int64), names[top]
    return rows, moment


def _levels(terms: Sequence[_Term], role: int) -> tuple[list[str], Bytes]:
    """The sum at all moments of one kind of micro-batch that every term has; then at those of one part alone.

    A moment of one part alone differs from the nearest one before it as it does in that part.
    """
    envelopes = [term.counts.envelope(role, term.depth, term.size) for term in terms]
    first = envelopes[0].rows
    shared = [name for name in first if all(name in other.rows for other in envelopes[1:])]
    if not shared:
        raise NotComposable("the parts share no moment of a micro-batch")
    total: Bytes = np.zeros((len(shared), len(LEDGER_ROWS)), dtype=np.int64)
    for term, envelope in zip(terms, envelopes, strict=True):
        total = total + term.sign * envelope.bytes[[envelope.rows[name] for name in shared]]
    names, rows = list(shared), [total]
    position = {name: row for row, name in enumerate(shared)}
    for term, envelope in zip(terms[1:], envelopes[1:], strict=True):
        near = shared[0]
        for name, row in envelope.rows.items() if term.sign > 0 else ():
            near = name if name in position else near
            if name not in first:
                own = envelope.bytes[row] - envelope.bytes[envelope.rows[near]]
                names.append(name)
                rows.append((total[position[near]] + own)[None])
    return names, np.concatenate(rows)
