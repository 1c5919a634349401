"""Sketches: memory and time of composed strategies, in microseconds each.

A composition (planner/compose.py) lists every call and every moment. The search needs two figures of each, so here what
adds up is added up once: seconds by phase and kind of micro-batch for every form and size, and bytes at every moment
for every combination of forms. Bytes are linear in the size of the micro-batch, so two sizes of a combination give all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.core.cost import Collective
from shardwise.core.strategy import Layout, Strategy
from shardwise.dryrun.moments import LEDGER_ROWS
from shardwise.engine.phase import PHASES as ALL_PHASES
from shardwise.hardware.cluster import Cluster
from shardwise.planner.compose import CountComposer
from shardwise.planner.compose_form import REST, LinearForm
from shardwise.planner.compose_sum import Sum, calls_of
from shardwise.planner.timing import (
    PASS_PHASES,
    TIME_COLUMNS,
    CollectiveCalls,
    StepTime,
    add_call,
    collective_seconds,
    combined_time,
)
from shardwise.technique import layout_of

ORDERED_PHASES: tuple[str, ...] = (*PASS_PHASES, *(phase for phase in ALL_PHASES if phase not in PASS_PHASES))
MICRO_BATCH_KINDS: tuple[int, ...] = (REST, 0, 2, 1)
"""The step outside of micro-batches; its first micro-batch, its last, and all others."""

STATE_ROWS, ACTIVATION_ROWS = (
    ("parameters", "master_weights", "gradients", "optimizer_state"),
    ("activations",),
)
_GROUPS = np.array(
    [
        [row in STATE_ROWS, row in ACTIVATION_ROWS, row not in (*STATE_ROWS, *ACTIVATION_ROWS)]
        for row in LEDGER_ROWS
    ],
    dtype=np.float64,
)

Floats = npt.NDArray[np.float64]


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
class Sketch:
    """What the device and the host must have without fragmentation and the profile's overhead, and the step's time.

    Attributes:
        computing: seconds of the passes' kernels alone, all micro-batches together.
        updating: seconds of the optimizer phase's kernels.
    """

    bytes: int
    host_bytes: int
    seconds: float
    computing: float
    updating: float
    communicators: int


@dataclass
class Sketcher:
    """Sketches strategies of one recipe on one cluster."""

    composer: CountComposer
    cluster: Cluster
    _numbers: dict[Collective, int] = field(default_factory=dict)
    _works: dict[tuple[LinearForm, int, int], _Work] = field(default_factory=dict)
    _levels: dict[tuple[object, ...], _Levels] = field(default_factory=dict)
    _seconds: dict[tuple[Layout, int], float] = field(default_factory=dict)

    def sketch(self, strategy: Strategy, micro_batches: int, share: Share | None = None) -> Sketch:
        """One strategy's figures, or those of a rank that has a share of them. Raises NotComposable."""
        share = share or Share()
        whole = self.composer.whole(strategy, micro_batches)
        layout = layout_of(strategy, self.cluster.world_size)
        time, sums = self._time(whole, layout, micro_batches, share)
        passes = sum(time.passes.values())
        host = sum(int(term.host.sum()) for term, _ in whole.changes) - sum(
            int(before.host.sum()) for _, before in whole.changes
        )
        return Sketch(
            bytes=self._highest(whole, share) + micro_batches * whole.size * self.composer.sample_bytes,
            host_bytes=host + int(whole.terms[0].host.sum()),
            seconds=time.seconds + passes * (share.longer - 1),
            computing=sum(sum(sums[phase][:2]) for phase in PASS_PHASES if phase in sums),
            updating=sum(sums["optimizer"][:2]) if "optimizer" in sums else 0.0,
            communicators=max(term.form.base.communicators for term in whole.terms),
        )

    # -- time ---------------------------------------------------------------------------------------

    def _time(
        self, whole: Sum, layout: Layout, count: int, share: Share
    ) -> tuple[StepTime, dict[str, list[float]]]:
        weights = np.array([1.0, 1.0, float(count > 1), float(max(0, count - 2))])
        origin = whole.terms[0]
        work = self._work(origin.form, origin.depth, origin.size)
        seconds, calls = work.seconds, dict(work.calls)
        for term, before in whole.changes:
            after = self._work(term.form, term.depth, term.size)
            least = self._work(before.form, before.depth, before.size)
            seconds = seconds + after.seconds - least.seconds
            for number, each in after.calls.items():
                calls[number] = calls[number] + each if number in calls else each
            for number, each in least.calls.items():
                calls[number] = calls[number] - each if number in calls else -each
        table = np.tensordot(weights, seconds, 1)
        table[: len(PASS_PHASES)] *= share.work
        table[len(PASS_PHASES) :] *= share.updates
        rows = np.maximum(table, 0.0).tolist()
        sums = {phase: row for phase, row in zip(ORDERED_PHASES, rows, strict=True) if any(row)}
        exchanges = self._exchanges(calls, layout, weights, share)
        return combined_time(dict(sums), exchanges, count, self.cluster), {k: [*v] for k, v in sums.items()}

    def _exchanges(
        self, calls: Mapping[int, Floats], layout: Layout, weights: Floats, share: Share
    ) -> Sequence[CollectiveCalls]:
        exchanges, collectives = [], list(self._numbers)
        for number, counts in calls.items():
            total = float(counts @ weights)
            if total <= 0:
                continue
            collective = collectives[number]
            passes = float((counts[1:] > 0) @ weights[1:]) or 1.0
            if collective.phase in PASS_PHASES:
                total *= share.work
            each = self._each(number, collective, layout, share.layout or layout)
            exchanges.append(CollectiveCalls(collective, total, passes, each))
        return exchanges

    def _each(self, number: int, collective: Collective, counted: Layout, placed: Layout) -> float:
        """Seconds of one call on the mesh ``placed``, where it was counted on another one."""
        key = (placed, number)
        if key not in self._seconds:
            axis, degree = collective.axis, collective.degree
            if axis in counted:
                degree = degree * placed.degree(axis) // counted.degree(axis)
            one = replace(collective, calls=1, degree=degree)
            self._seconds[key] = collective_seconds(one, placed, self.cluster) if degree > 1 else 0.0
        return self._seconds[key]

    def _work(self, form: LinearForm, depth: int, size: int) -> _Work:
        key = (form, depth, size)
        if key not in self._works:
            self._works[key] = self._added_up(form, depth, size)
        return self._works[key]

    def _added_up(self, form: LinearForm, depth: int, size: int) -> _Work:
        seconds, exchanged = (
            np.zeros((len(MICRO_BATCH_KINDS), len(ORDERED_PHASES), TIME_COLUMNS)),
            dict[int, Floats](),
        )
        for index, kind in enumerate(MICRO_BATCH_KINDS):
            sums: dict[str, list[float]] = {}
            for call, calls in calls_of(form.calls(depth, size), kind).items():
                if isinstance(call, Collective):
                    number = self._numbers.setdefault(call, len(self._numbers))
                    exchanged.setdefault(number, np.zeros(len(MICRO_BATCH_KINDS)))[index] += calls
                else:
                    add_call(sums, call, calls, self.cluster)
            for phase, row in sums.items():
                seconds[index, ORDERED_PHASES.index(phase)] = row
        return _Work(seconds, exchanged)

    # -- memory -------------------------------------------------------------------------------------

    def _highest(self, whole: Sum, share: Share) -> int:
        """Bytes at the highest moment."""
        key = (*(term.form for term in whole.terms), *(term.depth for term in whole.terms), *whole.roles)
        levels = self._levels.setdefault(key, _Levels())
        parts = np.array([share.states, share.activations, 1.0])
        return int((levels.at(whole) @ parts).max())


class _Work(NamedTuple):
    """What a form does: seconds by [kind of micro-batch, phase, column], and calls of every collective by kind."""

    seconds: Floats
    calls: dict[int, Floats]


@dataclass
class _Levels:
    """Bytes of one combination of forms, by [moment, group of the ledger's rows], linear in the micro-batch."""

    known: dict[int, Floats] = field(default_factory=dict)
    slope: Floats | None = None

    def at(self, whole: Sum) -> Floats:
        size = whole.size
        if size not in self.known:
            if self.slope is None or not all(term.form.larger is not None for term in whole.of_size):
                self.known[size] = np.concatenate([whole.rows(role) for role in whole.roles]) @ _GROUPS
            else:
                first = next(iter(self.known))
                self.known[size] = self.known[first] + (size - first) * self.slope
            if self.slope is None and len(self.known) == 2:
                (one, low), (two, high) = self.known.items()
                self.slope = (high - low) / (two - one)
        return self.known[size]
