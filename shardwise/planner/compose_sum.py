"""The sum of a composition: the origin's counts, and what each part of a step changes (planner/compose.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.core.cost import Collective, CountedCall, Kernel, StepCost
from shardwise.core.ledger import Ledger, Peak, ledger_from
from shardwise.dryrun.moments import LEDGER_ROWS, STEP_START, Bytes, unnumbered
from shardwise.dryrun.run import whole_cost
from shardwise.dryrun.tally import Tally
from shardwise.planner.compose_align import Alignment, aligned
from shardwise.planner.compose_form import ACTIVATIONS_ROW, REST, Calls, LinearForm

ROLES = 3
"""The first micro-batch, one like all others, and the last (engine/forward_backward.py)."""


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


@dataclass(frozen=True)
class Term:
    """A form, and the size of micro-batch and the depth at which it is compared with the origin."""

    form: LinearForm
    size: int
    depth: int

    @property
    def bytes(self) -> Bytes:
        return self.form.bytes(self.depth, self.size)

    @property
    def totals(self) -> Bytes:
        return self.form.totals(self.depth, self.size)

    @property
    def calls(self) -> Calls:
        return self.form.calls(self.depth, self.size)

    def number(self, attribute: str) -> int:
        return self.form.number(attribute, self.depth)

    @property
    def host(self) -> Bytes:
        return self.form.host(self.depth, self.size)


@dataclass(frozen=True)
class Sum:
    """The origin's term, which comes first, and what the terms of the parts change.

    Attributes:
        alignments: those that are known, by the forms and the kind of micro-batch.
        count, size: micro-batches and their size of the strategy that is composed.
    """

    terms: Sequence[Term]
    alignments: dict[tuple[int, ...], Alignment]
    count: int
    size: int

    @property
    def roles(self) -> list[int]:
        """The kinds of micro-batches of the step, and the rest of it."""
        return [REST, 0, *([2] if self.count > 1 else []), *([1] if self.count > 2 else [])]

    @cached_property
    def changes(self) -> list[tuple[Term, Term]]:
        """The parts' terms, each with the origin's at the same size and depth."""
        origin = self.terms[0].form
        return [(term, Term(origin, term.size, term.depth)) for term in self.terms[1:]]

    def composed(self, sample_bytes: int) -> Composed:
        origin = self.terms[0]
        _, rows, name = max((self._highest(role) for role in self.roles), key=lambda found: found[0])
        rows[ACTIVATIONS_ROW] += self.count * self.size * sample_bytes
        host, disk = origin.host, origin.number("disk_bytes")
        for term, before in self.changes:
            host = host + term.host - before.host
            disk += term.number("disk_bytes") - before.number("disk_bytes")
        bases = [term.form.base for term in self.terms]
        return Composed(
            peak=_peak(rows, name, origin.depth),
            host=_rounded_ledger(host),
            disk_bytes=max(0, disk),
            cost=self._cost(),
            parameters=origin.number("parameters"),
            communicators=max(base.communicators for base in bases),
            even=all(base.even for base in bases),
            compute_dtype=bases[0].compute_dtype,
            notes=tuple(dict.fromkeys(note for base in bases for note in base.notes)),
        )

    @property
    def of_size(self) -> list[Term]:
        """The terms that grow with the micro-batch; that of the states is taken at one size."""
        return [term for term in self.terms if term.size == self.size]

    def rows(self, role: int) -> Bytes:
        """[moment, row of the ledger] of one kind of micro-batch: the moments that all terms have, then the others."""
        alignment = self.alignment(role)
        shared = self._levels(alignment.rows, lambda term: term.bytes)
        others = [
            self.terms[index].bytes[own] - self.terms[index].bytes[alignment.rows[index][near]] + shared[near]
            for index, (own, near) in alignment.only.items()
        ]
        return np.concatenate([shared, *others])

    def alignment(self, role: int) -> Alignment:
        """The moments of one kind of micro-batch in all forms."""
        key = (*(id(term.form.base) for term in self.terms), role)  # the composer keeps every form
        if key not in self.alignments:
            self.alignments[key] = aligned([term.form.indices(role) for term in self.terms])
        return self.alignments[key]

    def _highest(self, role: int) -> tuple[int, Bytes, str]:
        """Bytes, rows and name of the highest moment of one kind of micro-batch."""
        alignment = self.alignment(role)
        levels = self._levels(alignment.rows, lambda term: term.totals)
        top = int(levels.argmax())
        best, name, number, at, row = int(levels[top]), alignment.shared[top], 0, top, 0
        for index, (own, near) in alignment.only.items():
            totals = self.terms[index].totals
            others = totals[own] - totals[alignment.rows[index][near]] + levels[near]
            top = int(others.argmax())
            if others[top] > best:
                best, number, at, row = int(others[top]), index, int(near[top]), int(own[top])
                name = self.terms[index].form.base.names[row]
        ledger = self._levels([rows[[at]] for rows in alignment.rows], lambda term: term.bytes)[0]
        if number:
            bytes_ = self.terms[number].bytes
            ledger = ledger + bytes_[row] - bytes_[alignment.rows[number][at]]
        return best, ledger, name

    def _levels(self, rows: Sequence[Bytes], of: Callable[[Term], Bytes]) -> Bytes:
        """The sum at moments that all terms have, given the row of each in each form."""
        levels = of(self.terms[0])[rows[0]]
        for (term, before), theirs in zip(self.changes, rows[1:], strict=True):
            levels = levels + of(term)[theirs] - of(before)[rows[0]]
        return levels

    def _cost(self) -> StepCost:
        """Calls of the origin, and what the parts add and take away."""
        tallies: dict[int | None, Tally] = {}
        for role in self.roles:
            calls = Counter(calls_of(self.terms[0].calls, role))
            for term, before in self.changes:
                calls.update(calls_of(term.calls, role))
                calls.subtract(calls_of(before.calls, role))
            tallies[None if role == REST else min(role, self.count - 1)] = _tally(calls)
        return whole_cost(tallies, min(self.count, ROLES), self.count)


def _peak(rows: Bytes, name: str, depth: int) -> Peak:
    phase, where, operation, *_ = (*name.split("|"), "", "")
    if name == STEP_START:
        return Peak(_rounded_ledger(rows), "forward", "")
    return Peak(_rounded_ledger(rows), phase, unnumbered(where, depth) or f"the loss ({operation})")


def _rounded_ledger(rows: Bytes) -> Ledger:
    return ledger_from({row: max(0, int(size)) for row, size in zip(LEDGER_ROWS, rows, strict=True)})


def calls_of(calls: Calls, role: int) -> Counter[CountedCall]:
    """Calls of one kind of micro-batch; of the only one where a form has one."""
    return calls[role] if role in calls else Counter() if role == REST else calls.get(0, Counter())


def _tally(calls: Mapping[CountedCall, int]) -> Tally:
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
