"""Pairwise coverage: few rows in which every pair of values of two factors occurs at least once.

The product of all factors grows too large to list, so rows are grown from pairs: take a pair that is still
missing, complete it in many ways (all defaults, defaults with up to two changes, at random), and keep the
allowed one that covers most of what is missing. A pair that no completion allows cannot occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_RANDOM_COMPLETIONS = 60


def covering_rows(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows that ``allowed`` accepts, covering every possible pair; deterministic. Defaults come first in factors."""
    generator = random.Random(0)
    missing = dict.fromkeys(_all_pairs(factors))
    chosen: list[Row] = []
    while missing:
        pair = next(iter(missing))
        rows = [row for row in _completions(pair, factors, generator) if allowed(row)]
        if not rows:
            del missing[pair]
            continue
        best = max(rows, key=lambda row: sum(p in missing for p in _pairs(row)))
        chosen.append(best)
        for covered in _pairs(best):
            missing.pop(covered, None)
    return chosen


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    for (first, some), (second, others) in combinations(factors.items(), 2):
        yield from (((first, a), (second, b)) for a in some for b in others)


def _completions(pair: Pair, factors: Mapping[str, Sequence[Any]], generator: random.Random) -> Iterator[Row]:
    """Whole rows that hold ``pair``, the systematic ones last: they are for pairs that little goes with."""
    fixed = dict(pair)
    for _ in range(_RANDOM_COMPLETIONS):
        yield {name: fixed.get(name, generator.choice(list(values))) for name, values in factors.items()}
    plain = {name: fixed.get(name, values[0]) for name, values in factors.items()}
    yield plain
    changes = [(name, value) for name, values in factors.items() if name not in fixed for value in values[1:]]
    yield from (plain | {name: value} for name, value in changes)
    yield from (plain | dict(two) for two in combinations(changes, 2))


def _pairs(row: Row) -> list[Pair]:
    return list(combinations(row.items(), 2))
