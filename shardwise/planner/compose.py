"""Counts of a strategy composed from shallow dry runs of other strategies.

Techniques say which part of a step they act on (``Technique.part``): where the states are, what a block keeps for the
backward pass, the loss. What two parts change adds up. So a strategy needs a form (compose_form.py) of each part
alone, and not of every combination:

    F(moment) = origin + sum over the parts of (form of the part - origin)

The origin has every part at its defaults. Settings without a part, such as the precision or a tensor-parallel degree,
change everything: each value of them has its own origin. A moment that only one part's form has (a recomputed
operation, say) takes its difference from the nearest moment that all forms have, of the same block if there is one. The
peak is the largest F, so it is found wherever it moves to.

Not composed, but counted by two shallow dry runs of the strategy itself (planner/predict.py): stages, whose ranks
differ; and a treatment of blocks that depends on the depth of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwise.core.strategy import Strategy
from shardwise.planner.compose_align import Alignment, NotComposable
from shardwise.planner.compose_corner import CornerPoint, Counting
from shardwise.planner.compose_form import LinearForm, NotLinear
from shardwise.planner.compose_sum import ROLES, Composed, Sum, Term
from shardwise.planner.read_ahead import ReadAhead
from shardwise.technique import MICRO_BATCH_SIZE, OF_BLOCKS, PARTS, STATES, within

COMPOSED_DEPTH = 4
"""Blocks of the shallower model: the first and the last differ from those between them, and what these hold in the
backward pass is linear in their number, so its largest is at the second or at the last but one. Where the treatment of
blocks repeats itself after several, it is so many times as many."""


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
    _forms: dict[tuple[Strategy, int, int, int], LinearForm] = field(default_factory=dict)
    _alignments: dict[tuple[int, ...], Alignment] = field(default_factory=dict)
    _unlike: set[tuple[Strategy, int]] = field(default_factory=set)

    def composed(self, strategy: Strategy, micro_batches: int) -> Composed:
        """The counts of one strategy. Raises NotComposable."""
        return self.whole(strategy, micro_batches).composed(self.sample_bytes)

    def whole(self, strategy: Strategy, micro_batches: int) -> Sum:
        """The terms of one strategy's sum, all of models with the same blocks. Raises NotComposable."""
        terms = self._terms(strategy, micro_batches, COMPOSED_DEPTH)
        deepest = max(term.form.depth for term in terms)
        if terms[0].form.depth < deepest:  # its blocks between the first and the last are not all alike
            terms = self._terms(strategy, micro_batches, deepest)
        return Sum(terms, self._alignments, micro_batches, strategy[MICRO_BATCH_SIZE])

    def _terms(self, strategy: Strategy, micro_batches: int, least: int) -> list[Term]:
        """The terms, of models of at least so many blocks."""
        size = strategy[MICRO_BATCH_SIZE]
        single = strategy.with_values(**{MICRO_BATCH_SIZE.key: 1})
        passes = _run_of(micro_batches)
        origin = within(single, None)
        plain = self._form(origin, 1, size, least)
        terms = [Term(plain, size, self.depth)]
        for part in PARTS:
            alone = within(single, part)
            if part == STATES and (alone != origin or passes > 1):
                terms.append(Term(self._known(alone, passes, plain.size, least), plain.size, self.depth))
            elif alone != origin:
                terms.append(self._alone(alone, part, plain, size))
        return terms

    @contextmanager
    def reading_ahead(self, wanted: Iterable[tuple[Strategy, Sequence[int]]]) -> Iterator[None]:
        """Count ahead, in other processes, what strategies need, each with the numbers of micro-batches it may have.

        What the first of these numbers needs is counted first.
        """
        asked = dict.fromkeys(
            (strategy, tuple(dict.fromkeys(map(_run_of, counts)))) for strategy, counts in wanted
        )
        found = (
            point
            for choice in (0, 1)
            for start in (1, 2)
            for strategy, passes in asked
            for point in self._expected(strategy, start, passes[choice : choice + 1])
        )
        points = list(dict.fromkeys(found))
        number = {point: index for index, point in enumerate(points)}
        here = self.count
        with ReadAhead(here, points) as ahead:
            self.count = lambda point: ahead.get(number[point]) if point in number else here(point)
            try:
                yield
            finally:
                self.count = here

    def _expected(self, strategy: Strategy, start: int, passes_run: Sequence[int]) -> Iterator[CornerPoint]:
        """Points that ``whole`` may take, where forms are linear from a micro-batch of ``start``."""
        size = strategy[MICRO_BATCH_SIZE]
        single = strategy.with_values(**{MICRO_BATCH_SIZE.key: 1})
        origin = within(single, None)
        for part in (None, *PARTS) if start <= size else ():
            alone = within(single, part)
            for passes in passes_run if part == STATES else (1,):
                unchanged = part is not None and passes == 1 and alone == origin
                if unchanged or (alone, passes, start, COMPOSED_DEPTH) in self._forms:
                    continue
                yield CornerPoint(alone, COMPOSED_DEPTH, start, passes)
                if part is None or part in (*OF_BLOCKS, STATES):
                    yield CornerPoint(alone, COMPOSED_DEPTH + 1, start, passes)
                if part != STATES and size > start:
                    yield CornerPoint(alone, COMPOSED_DEPTH, 2 * start, passes)

    def knows(self, strategy: Strategy) -> bool:
        """Whether the origin of a strategy has been counted."""
        origin = within(strategy.with_values(**{MICRO_BATCH_SIZE.key: 1}), None)
        return any(known == origin for known, *_ in self._forms)

    def _alone(self, strategy: Strategy, part: str, plain: LinearForm, size: int) -> Term:
        """What one part changes: in a model as shallow as the origin's base, if its blocks are the same."""
        if part not in OF_BLOCKS:
            form = self._form(strategy, 1, size, plain.depth, deep=False)
            if form.depth == plain.depth:
                return Term(form, size, form.depth)
        return Term(self._form(strategy, 1, size, plain.depth), size, self.depth)

    def _form(
        self, strategy: Strategy, passes: int, size: int, least: int, *, deep: bool = True
    ) -> LinearForm:
        """A form for this size: linear in the size from 1, else from 2, else of this size alone."""
        for start in (1, 2) if size > 2 else (1,):
            if start == size:
                return self._known(strategy, passes, size, least, deep=deep)
            if (strategy, start) not in self._unlike:
                form = self._known(strategy, passes, start, least, wide=True, deep=deep)
                try:
                    form.require_linear()
                    return form
                except NotLinear:
                    self._unlike.add((strategy, start))
                    self._forms[strategy, passes, start, least] = form.of_one_size()
        return self._known(strategy, passes, size, least, deep=deep)

    def _known(
        self, strategy: Strategy, passes: int, size: int, least: int, *, wide: bool = False, deep: bool = True
    ) -> LinearForm:
        """The form that starts at this size; ``wide`` asks for a larger micro-batch, too, ``deep`` for more blocks."""
        key = (strategy, passes, size, least)
        known = self._forms.get(key) or self._base(strategy, passes, size, least)
        if deep and known.deeper is None and known.depth < self.depth:
            deeper = self.count(CornerPoint(strategy, known.depth + known.repeat, size, passes))
            known = known.with_corners(deeper=deeper)
        if wide and known.larger is None:
            known = known.with_corners(
                larger=self.count(CornerPoint(strategy, known.depth, 2 * size, passes))
            )
        self._forms[key] = known
        return known

    def _base(self, strategy: Strategy, passes: int, size: int, least: int) -> LinearForm:
        """A form of one corner, whose blocks are repeated a whole number of times in the model."""
        depth = min(least, self.depth)
        base = self.count(CornerPoint(strategy, depth, size, passes))
        repeat = base.repeat_every
        if repeat == 0:
            raise NotComposable("how a block is treated depends on the depth of the model")
        least = max(depth, COMPOSED_DEPTH * repeat, base.min_depth)
        least = min(least + (self.depth - least) % repeat, self.depth)
        if least > depth:
            depth, base = least, self.count(CornerPoint(strategy, least, size, passes))
        return LinearForm(base, depth, size, repeat=repeat)


def _run_of(micro_batches: int) -> int:
    """The micro-batches that a dry run needs for a step with this number of them."""
    return 1 if micro_batches == 1 else ROLES
