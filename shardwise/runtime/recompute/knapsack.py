"""A knapsack: the results to keep within a number of bytes, so that computing the others again costs least.

Every operation whose result is not kept runs again, so each item spares its own cost, whatever else is kept. Items are
taken one by one; of the choices so far only those are carried along that spare more than every smaller one. Where
these are more than ``MAX_LABELS`` they are thinned out to about as many, evenly in bytes, which may cost the best
choice by a five-hundredth of the limit.

Cost is FLOPs first and bytes moved second. Seconds would need a device's ratio of FLOPs to bandwidth, and the plan,
the run and all ranks must choose alike. So FLOPs are spared first even where products are very narrow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_LABELS = 512

Cost = tuple[int, int]
"""FLOPs, then bytes moved."""


@dataclass(frozen=True)
class Item:
    """One result: the bytes that keeping it takes, and the cost of computing it again."""

    size: int
    cost: Cost


@dataclass(frozen=True)
class Choice:
    """Items to keep, by their number; the bytes they take and the cost they spare."""

    size: int
    spared: Cost
    kept: frozenset[int]


@functools.lru_cache(maxsize=64)
def best(items: tuple[Item, ...], limit: int) -> Choice:
    """The items of at most ``limit`` bytes that spare most."""
    choices = [Choice(0, (0, 0), frozenset())]
    for number, item in enumerate(items):
        more = [_choice_with(choice, number, item) for choice in choices if choice.size + item.size <= limit]
        choices = _undominated([*choices, *more], max(1, limit // MAX_LABELS))
    return choices[-1]


def _choice_with(choice: Choice, number: int, item: Item) -> Choice:
    spared = (choice.spared[0] + item.cost[0], choice.spared[1] + item.cost[1])
    return Choice(choice.size + item.size, spared, choice.kept | {number})


def _undominated(choices: list[Choice], spacing: int) -> list[Choice]:
    """The choices in order of bytes. Each one saves more recomputation than the one before it."""
    # Of equal size the best one first, which leaves the others out.
    choices.sort(key=lambda choice: (choice.size, (-choice.spared[0], -choice.spared[1])))
    frontier: list[Choice] = []
    for choice in choices:
        if not frontier or choice.spared > frontier[-1].spared:
            frontier.append(choice)
    if len(frontier) <= MAX_LABELS:
        return frontier
    thin = {
        choice.size // spacing: choice for choice in frontier[1:]
    }  # the last of about the same size is the best
    return [frontier[0], *thin.values()]
