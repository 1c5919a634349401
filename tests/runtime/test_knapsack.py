"""The knapsack of a recomputation budget, against every choice there is on random items."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from itertools import pairwise

import pytest

from shardwise.runtime.recompute.knapsack import MAX_LABELS, Cost, Item, best


def random_items(seed: int, count: int = 9) -> tuple[Item, ...]:
    chance = random.Random(seed)
    return tuple(
        Item(chance.randint(1, 9), (chance.choice((0, 0, chance.randint(1, 9))), chance.randint(1, 9)))
        for _ in range(count)
    )


def spared_by(items: Iterable[Item]) -> Cost:
    chosen = list(items)
    return sum(item.cost[0] for item in chosen), sum(item.cost[1] for item in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_spares_more(seed: int) -> None:
    items = random_items(seed)
    every = [
        (sum(item.size for item in kept), spared_by(kept))
        for count in range(len(items) + 1)
        for kept in itertools.combinations(items, count)
    ]
    for limit in (0, 3, 10, 17, 30, 100):
        found = best(items, limit)
        assert found.spared == max(spared for size, spared in every if size <= limit)
        assert found.size == sum(items[number].size for number in found.kept) <= limit
        assert found.spared == spared_by(items[number] for number in found.kept)


def test_thinned_choices_stay_within_the_limit_and_lose_little() -> None:
    """Powers of two: 2^16 choices, no two of the same size. An item spares its size, so the limit is the optimum."""
    items = tuple(Item(2**n + 1, (2**n + 1, 0)) for n in range(16))
    whole = sum(item.size for item in items)
    found = [best(items, whole * share // 50) for share in range(51)]
    assert all(earlier.spared <= later.spared for earlier, later in pairwise(found))
    for share, choice in enumerate(found):
        limit = whole * share // 50
        assert limit - 2 * limit / MAX_LABELS - 2 <= choice.size <= limit


def test_flops_come_before_bytes_moved() -> None:
    items = (Item(4, (1, 0)), Item(4, (0, 1000)))
    assert best(items, 4).kept == {0}
    assert best(items, 8).kept == {0, 1}
