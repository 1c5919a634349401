"""Pairwise coverage: few rows in which every pair of values of two factors occurs at least once.

The product of all factors grows too large to list, so rows are grown from pairs: take a pair that is still
missing, complete it in many ways (all defaults, defaults with up to two changes, at random), and keep the
allowed one that covers most missing pairs. A pair that no completion allows cannot occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_RANDOM_COMPLETIONS = 60
_TRIES, _SHUFFLED = 50, 0.4


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool] = lambda row: True,
    wanted: Callable[[Pair], bool] = lambda pair: True,
    cost: Callable[[Row], float] = lambda row: 1.0,
    given: Sequence[Row] = (),
) -> list[Row]:
    """Rows that cover every possible pair of values; deterministic.

    Args:
        factors: the values of each factor, its default first.
        allowed: whether a row may be chosen.
        wanted: whether a pair has to be covered.
        cost: of a row; the next row is the one that covers most missing pairs for its cost.
        given: rows that there are already.
    """
    generator = random.Random(0)
    index, numbers = _numbered(factors), list(combinations(range(len(factors)), 2))
    missing = np.zeros((len(index), len(index)), dtype=bool)
    there = {pair for row in given for pair in _pairs(row)}
    pairs = dict.fromkeys(pair for pair in _all_pairs(factors) if wanted(pair) and pair not in there)
    for first, second in pairs:
        missing[index[first], index[second]] = True
    chosen: list[Row] = []
    while pairs:
        pair = next(iter(pairs))
        rows = list(_completions(pair, factors, generator))
        values = np.array([[index[value] for value in row.items()] for row in rows])
        covered = sum(missing[values[:, a], values[:, b]].astype(int) for a, b in numbers)
        worth = covered / np.array([cost(row) for row in rows])
        # ``allowed`` is slow: it is asked about the best row first, among equals about the earliest.
        best = next((rows[i] for i in np.argsort(-worth, kind="stable") if allowed(rows[i])), None)
        if best is None:
            del pairs[pair]
            missing[index[pair[0]], index[pair[1]]] = False
            continue
        chosen.append(best)
        for first, second in _pairs(best):
            pairs.pop((first, second), None)
            missing[index[first], index[second]] = False
    return chosen


def few_of(
    rows: Sequence[Row], anchor: str = "", cost: Callable[[Row], float] = lambda row: 1.0
) -> list[Row]:
    """Few of ``rows``, which together have each value and each pair of values with the factor ``anchor``.

    The cheapest of some greedy choices, whose costs are shuffled a little; deterministic.
    """
    generator, prices = random.Random(0), [cost(row) for row in rows]
    held = [
        {((name, value), (name, value)) for name, value in row.items()}
        | {pair for pair in _pairs(row) if anchor in (pair[0][0], pair[1][0])}
        for row in rows
    ]
    tries = [
        _greedy(held, [price * generator.uniform(1.0, 1.0 + _SHUFFLED * (number > 0)) for price in prices])
        for number in range(_TRIES)
    ]
    best = min(tries, key=lambda chosen: sum(prices[index] for index in chosen))
    return [rows[index] for index in sorted(best)]


def _greedy(held: Sequence[set[Pair]], prices: Sequence[float]) -> set[int]:
    """Positions of sets that together have all that all have; each has something that no other has."""
    missing, chosen = set().union(*held), set[int]()
    while missing:
        best = max(range(len(held)), key=lambda index: len(held[index] & missing) / prices[index])
        chosen.add(best)
        missing -= held[best]
    for index in sorted(chosen, key=lambda index: -prices[index]):
        if held[index] <= set().union(*(held[other] for other in chosen - {index})):
            chosen.remove(index)
    return chosen


def _numbered(factors: Mapping[str, Sequence[Any]]) -> dict[tuple[str, Any], int]:
    values = [(name, value) for name, values in factors.items() for value in values]
    return {value: number for number, value in enumerate(values)}


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
