"""Counts of a strategy composed from shallow dry runs of other strategies.

Techniques say which part of a step they act on (``Technique.part``): where the states are, what a block keeps for the
backward pass, the loss. What two parts change adds up. So a strategy needs a form (plan/compose_form.py) of each part
alone, and not of every combination:

    F(moment) = origin + sum over the parts of (form of the part - origin)

The origin has every part at its defaults. Settings without a part, such as the precision or a tensor-parallel degree,
change everything: each value of them has its own origin. A moment that only one part's form has (a recomputed
operation, say) takes its difference from the nearest moment that all forms have, of the same block if there is one. The
peak is the largest F, so it is found wherever it moves to.

Not composed, but counted by two shallow dry runs of the strategy itself (plan/predict.py): stages, whose ranks
differ; and a treatment of blocks that depends on the depth of the whole model.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.core.cost import Collective, Counted, Kernel, StepCost
from shardwise.core.ledger import Ledger, Peak, ledger_from
from shardwise.core.strategy import Strategy
from shardwise.dryrun.moments import ROWS, START, Bytes, unnumbered
from shardwise.dryrun.run import whole_cost
from shardwise.dryrun.tally import Tally
from shardwise.plan.compose_corner import Counting, Point
from shardwise.plan.compose_form import KEPT, REST, Calls, LinearForm, NotLinear
from shardwise.technique import MICRO_BATCH_SIZE, PARTS, STATES, within

SHALLOW = 4
"""Blocks of the shallower model: the first and the last differ from those between them, and what these hold in the
backward pass is linear in their number, so its largest is at the second or at the last but one."""

ROLES = 3
"""The first micro-batch, one like all others, and the last (engine/forward_backward.py)."""


class NotComposable(Exception):
    """The counts of this strategy do not follow from those of others; the text says why."""


@dataclass(frozen=True)
class Composed:
    """What rank 0 of a strategy holds at its peak and does in a step."""

    peak: Peak
    host: Ledger
    disk_bytes: int
    cost: StepCost
    parameters: int
    communicators: int
    even: bool
    compute_dtype: str
    notes: tuple[str, ...]


@dataclass
class CountComposer:
    """Composes strategies of one recipe on one cluster.

    Attributes:
        count: counts a corner.
        depth: blocks of the whole model.
        sample_bytes: of one sequence.
    """

    count: Counting
    depth: int
    sample_bytes: int
    _forms: dict[tuple[Strategy, int, int | None], LinearForm] = field(default_factory=dict)
    _alignments: dict[tuple[int, ...], _Alignment] = field(default_factory=dict)
    _unlike: set[tuple[Strategy, int]] = field(default_factory=set)

    def composed(self, strategy: Strategy, micro_batches: int) -> Composed:
        """The counts of one strategy. Raises NotComposable."""
        size = strategy[MICRO_BATCH_SIZE]
        single = strategy.with_values(**{MICRO_BATCH_SIZE.key: 1})
        passes = 1 if micro_batches == 1 else ROLES
        origin = within(single, None)
        plain = self._form(origin, 1, size)
        terms = [_Term(plain, size)]
        for part in PARTS:
            alone = within(single, part)
            if part == STATES and (alone != origin or passes > 1):
                terms.append(_Term(self._known(alone, passes, plain.size, wide=False), plain.size))
            elif alone != origin:
                terms.append(_Term(self._form(alone, 1, size), size))
        return _Sum(terms, self._alignments, self.depth, micro_batches, size).composed(self.sample_bytes)

    def _form(self, strategy: Strategy, passes: int, size: int) -> LinearForm:
        """A form for this size: linear in the size from 1, else from 2, else of this size alone."""
        for start in (1, 2) if size > 2 else (1,):
            if start == size:
                return self._known(strategy, passes, size, wide=False)
            if (strategy, start) not in self._unlike:
                try:
                    form = self._known(strategy, passes, start, wide=True)
                    form.require_linear()
                    return form
                except NotLinear:
                    self._unlike.add((strategy, start))
        return self._known(strategy, passes, size, wide=False)

    def _known(self, strategy: Strategy, passes: int, size: int, *, wide: bool) -> LinearForm:
        """The form that starts at this size; ``wide`` asks for a larger micro-batch, too."""
        key = (strategy, passes, size)
        known = self._forms.get(key)
        if known is None:
            known = self._forms[key] = self._counted(strategy, passes, size)
        if wide and known.larger is None:
            larger = self.count(Point(strategy, known.depth, 2 * size, passes))
            known = self._forms[key] = LinearForm(
                known.base, known.depth, size, known.deeper, known.repeat, larger
            )
        return known

    def _counted(self, strategy: Strategy, passes: int, size: int) -> LinearForm:
        depth = min(SHALLOW, self.depth)
        base = self.count(Point(strategy, depth, size, passes))
        repeat = base.repeat_every
        if repeat == 0:
            raise NotComposable("how a block is treated depends on the depth of the model")
        least = max(depth, base.min_depth)
        least = min(least + (self.depth - least) % repeat, self.depth)
        if least > depth:
            depth, base = least, self.count(Point(strategy, least, size, passes))
        if depth == self.depth:
            return LinearForm(base, depth, size)
        return LinearForm(
            base, depth, size, self.count(Point(strategy, depth + repeat, size, passes)), repeat
        )


@dataclass(frozen=True)
class _Term:
    """A form, and the size of micro-batch at which it is compared with the origin."""

    form: LinearForm
    size: int


@dataclass(frozen=True)
class _Sum:
    """The origin's term, which comes first, and what the terms of the parts change.

    Attributes:
        alignments: those that are known, by the forms and the kind of micro-batch.
        depth, count, size: blocks, micro-batches and their size of the strategy that is composed.
    """

    terms: Sequence[_Term]
    alignments: dict[tuple[int, ...], _Alignment]
    depth: int
    count: int
    size: int

    @property
    def origin(self) -> LinearForm:
        return self.terms[0].form

    @property
    def roles(self) -> list[int]:
        """The kinds of micro-batches of the step, and the rest of it."""
        return [REST, 0, *([2] if self.count > 1 else []), *([1] if self.count > 2 else [])]

    def composed(self, sample_bytes: int) -> Composed:
        _, rows, name = max((self._highest(role) for role in self.roles), key=lambda found: found[0])
        rows[KEPT] += self.count * self.size * sample_bytes
        host, disk = self.origin.host(self.depth, self.size), self.origin.number("disk_bytes", self.depth)
        for form, size in self._parts():
            host = host + form.host(self.depth, size) - self.origin.host(self.depth, size)
            disk += form.number("disk_bytes", self.depth) - self.origin.number("disk_bytes", self.depth)
        bases = [term.form.base for term in self.terms]
        return Composed(
            peak=_peak(rows, name, self.depth),
            host=_ledger(host),
            disk_bytes=max(0, disk),
            cost=self._cost(),
            parameters=self.origin.number("parameters", self.depth),
            communicators=max(base.communicators for base in bases),
            even=all(base.even for base in bases),
            compute_dtype=bases[0].compute_dtype,
            notes=tuple(dict.fromkeys(note for base in bases for note in base.notes)),
        )

    def alignment(self, role: int) -> _Alignment:
        """The moments of one kind of micro-batch in all forms."""
        key = (*(id(term.form.base) for term in self.terms), role)  # the composer keeps every form
        if key not in self.alignments:
            self.alignments[key] = _aligned([term.form.indices(role) for term in self.terms])
        return self.alignments[key]

    def _parts(self) -> list[tuple[LinearForm, int]]:
        return [(term.form, term.size) for term in self.terms[1:]]

    def _highest(self, role: int) -> tuple[int, Bytes, str]:
        """Bytes, rows and name of the highest moment of one kind of micro-batch."""
        aligned = self.alignment(role)
        levels = self._levels(aligned.rows, lambda form, size: form.totals(self.depth, size))
        top = int(levels.argmax())
        best, name, number, at, row = int(levels[top]), aligned.shared[top], 0, top, 0
        for term, (own, near) in aligned.only.items():
            form, size = self.terms[term].form, self.terms[term].size
            totals = form.totals(self.depth, size)
            found = totals[own] - totals[aligned.rows[term][near]] + levels[near]
            top = int(found.argmax())
            if found[top] > best:
                best, number, at, row = int(found[top]), term, int(near[top]), int(own[top])
                name = form.base.names[row]
        ledger = self._levels(
            [rows[[at]] for rows in aligned.rows], lambda form, size: form.bytes(self.depth, size)
        )[0]
        if number:
            bytes_ = self.terms[number].form.bytes(self.depth, self.terms[number].size)
            ledger = ledger + bytes_[row] - bytes_[aligned.rows[number][at]]
        return best, ledger, name

    def _levels(self, rows: Sequence[Bytes], of: Callable[[LinearForm, int], Bytes]) -> Bytes:
        """The sum at moments that all terms have, given the row of each in each form."""
        levels = of(self.origin, self.size)[rows[0]]
        for (form, size), theirs in zip(self._parts(), rows[1:], strict=True):
            levels = levels + of(form, size)[theirs] - of(self.origin, size)[rows[0]]
        return levels

    def _cost(self) -> StepCost:
        """Calls of the origin, and what the parts add and take away."""
        tallies: dict[int | None, Tally] = {}
        start = self.origin.calls(self.depth, self.size)
        changes = [
            (form.calls(self.depth, size), self.origin.calls(self.depth, size))
            for form, size in self._parts()
        ]
        for role in self.roles:
            calls = Counter(_of(start, role))
            for after, before in changes:
                calls.update(_of(after, role))
                calls.subtract(_of(before, role))
            tallies[None if role == REST else min(role, self.count - 1)] = _tally(calls)
        return whole_cost(tallies, min(self.count, ROLES), self.count)


@dataclass(frozen=True)
class _Alignment:
    """The moments of one kind of micro-batch in several forms, the origin's first.

    Attributes:
        shared: names of those that all forms have, in the same order.
        rows: where they are in each form.
        only: by form, the others that it has: where they are, and the number of the shared moment next to each.
    """

    shared: Sequence[str]
    rows: Sequence[Bytes]
    only: Mapping[int, tuple[Bytes, Bytes]]


def _aligned(indices: Sequence[Mapping[str, int]]) -> _Alignment:
    shared = [name for name in indices[0] if all(name in index for index in indices[1:])]
    for index in indices[1:]:
        shared = _in_order(shared, index)
    if not shared:
        raise NotComposable("the parts share no moment of a micro-batch")
    order = {name: number for number, name in enumerate(shared)}
    only: dict[int, tuple[Bytes, Bytes]] = {}
    for number, index in enumerate(indices[1:], 1):
        others = [other for i, other in enumerate(indices) if i not in (0, number)]
        near = _nearest(index, indices[0], others, order)
        if near:
            own = np.array([index[name] for name in near])
            only[number] = own, np.array([order[name] for name in near.values()])
    return _Alignment(shared, [np.array([index[name] for name in shared]) for index in indices], only)


def _in_order(names: Sequence[str], index: Mapping[str, int]) -> list[str]:
    """The most of ``names`` that keep their order in ``index``: the longest increasing subsequence."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for number, name in enumerate(names):
        length = bisect_left(tails, index[name])
        before.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [index[name]]
        ends[length : length + 1] = [number]
    kept: list[str] = []
    last = ends[-1] if ends else -1
    while last >= 0:
        kept.append(names[last])
        last = before[last]
    return kept[::-1]


def _nearest(
    index: Mapping[str, int],
    origin: Mapping[str, int],
    others: Sequence[Mapping[str, int]],
    shared: Mapping[str, int],
) -> dict[str, str]:
    """The shared moment next to every moment that only one form has, or that the others have with the origin.

    It is the one before, unless only the one after is of the same block. A block that the other forms are too shallow
    for is left out: it is between two that they have.
    """
    names = list(index)
    after: dict[str, str] = {}
    following = next(name for name in reversed(names) if name in shared)
    for name in reversed(names):
        following = name if name in shared else following
        after[name] = following
    before, found = next(name for name in names if name in shared), {}
    for name in names:
        if name in shared:
            before = name
        elif name not in origin or all(name in other for other in others):
            block, numbered = _block(name)
            here, there = _block(before)[0] == block, _block(after[name])[0] == block
            if here or there or not numbered:
                found[name] = after[name] if there and not here else before
    return found


_NUMBER = re.compile(r"(.*?)\.-?\d+")


def _block(name: str) -> tuple[str, bool]:
    """The phase and the block of a moment, or its module's first name; and whether it is in a block."""
    phase, _, rest = name.partition("|")
    module = rest.partition("|")[0]
    numbered = _NUMBER.match(module)
    return f"{phase}|{numbered[0] if numbered else module.partition('.')[0]}", numbered is not None


def _peak(rows: Bytes, name: str, depth: int) -> Peak:
    phase, where, operation, *_ = (*name.split("|"), "", "")
    if name == START:
        return Peak(_ledger(rows), "forward", "")
    return Peak(_ledger(rows), phase, unnumbered(where, depth) or f"the loss ({operation})")


def _ledger(rows: Bytes) -> Ledger:
    return ledger_from({row: max(0, int(size)) for row, size in zip(ROWS, rows, strict=True)})


def _of(calls: Calls, role: int) -> Counter[Counted]:
    """Calls of one kind of micro-batch; of the only one where a form has one."""
    return calls[role] if role in calls else Counter() if role == REST else calls.get(0, Counter())


def _tally(calls: Mapping[Counted, int]) -> Tally:
    tally = Tally()
    for call, count in calls.items():
        if count > 0:
            if isinstance(call, Kernel):
                tally.kernels[call] += count
            elif isinstance(call, Collective):
                tally.collectives[call] += count
            else:
                tally.transfers[call] += count
    return tally
