"""Routes of tokens to ranks and of arrived rows to experts, against loops in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.runtime.parallel import dispatch
from shardwise.runtime.parallel.dispatch import Dispatch, Room, pairs_of, routes
from shardwise.runtime.parallel.tp_collectives import TPGroup
from shardwise.runtime.routed_rows import rows_of, sums_of


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_routes(data: st.DataObject) -> None:
    """Each rank has a row for its first tokens, in their order, and for no other; the load is the largest count."""
    ranks, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    one = st.permutations(range(ranks * experts))
    chosen, capacity = data.draw(st.integers(1, ranks * experts)), data.draw(st.integers(1, 7))
    index = [order[:chosen] for order in data.draw(st.lists(one, min_size=1, max_size=7))]
    token, row, most = routes(torch.tensor(index), ranks, experts, capacity)
    expected_token = [len(index)] * (ranks * capacity)
    expected_row = [[ranks * capacity] * ranks for _ in index]
    counts = [0] * ranks
    for number, choices in enumerate(index):
        for rank in {choice // experts for choice in choices}:
            if counts[rank] < capacity:
                there = rank * capacity + counts[rank]
                expected_token[there], expected_row[number][rank] = number, there
            counts[rank] += 1
    assert token.tolist() == expected_token
    assert row.tolist() == expected_row
    assert int(most) == max(counts)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pairs(data: st.DataObject) -> None:
    """The first choices that are experts here have a row, in their order; all are counted."""
    experts, chosen, capacity = (data.draw(st.integers(1, most)) for most in (3, 3, 10))
    rows = st.lists(st.integers(0, experts), min_size=chosen, max_size=chosen)
    number = data.draw(st.lists(rows, min_size=1, max_size=6))
    choice, pair, expert, count = pairs_of(torch.tensor(number, dtype=torch.int32), experts, capacity)
    flat = [here for row in number for here in row]
    here = [place for place, value in enumerate(flat) if value < experts]
    absent = max(capacity - len(here), 0)
    assert choice.tolist() == here[:capacity] + [len(flat)] * absent
    assert expert.tolist() == [flat[place] for place in here[:capacity]] + [experts] * absent
    places = [here.index(n) if n in here[:capacity] else capacity for n in range(len(flat))]
    assert pair.flatten().tolist() == places
    assert int(count) == len(here)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_sum_their_rows_and_nothing_else(data: st.DataObject) -> None:
    """In order of their choices; rows without a token may hold anything, NaN as well."""
    count, chosen = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 4))
    own = data.draw(st.sets(st.integers(0, count - 1), max_size=count))
    tokens = max(-(-len(own) // chosen), 1) + data.draw(st.integers(0, 3))
    places = data.draw(st.permutations(range(tokens * chosen)))
    row = torch.full((tokens * chosen,), count)
    for place, number in zip(places, own, strict=False):
        row[place] = number
    rows = torch.randn(count, 3, dtype=torch.float64)
    rows[[number for number in range(count) if number not in own]] = torch.nan
    sums = sums_of(rows, torch.zeros(count, dtype=torch.int64), row.view(tokens, chosen))
    expected = torch.zeros(tokens, 3, dtype=torch.float64)
    for place, number in enumerate(row.tolist()):
        if number < count:
            expected[place // chosen] += rows[number]
    assert torch.equal(sums, expected)


def test_a_token_without_a_row_adds_nothing() -> None:
    token, row, most = routes(torch.tensor([[0], [0], [0]]), 2, 1, 2)
    x = torch.ones(3, 2)
    source = token.clamp(max=2)
    assert sums_of(rows_of(x, source, row), source, row).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert int(most) == 3


@pytest.mark.parametrize(
    ("factor", "chosen", "ranks", "experts", "expected"),
    [
        (1.0, 2, 4, 1, (60, 240)),  # each expert on a rank of its own: rows are pairs
        (1.0, 2, 2, 2, (100, 240)),  # of 6 pairs of experts, 5 have one on a rank
        (1.25, 2, 2, 2, (120, 300)),  # all tokens are all rows that come from a rank
        (1.25, 1, 4, 2, (38, 150)),
    ],
)
def test_room_of_a_balanced_router(
    factor: float, chosen: int, ranks: int, experts: int, expected: tuple[int, int]
) -> None:
    """Of 120 tokens."""
    assert Room(factor).sizes(120, chosen, ranks, experts) == expected


def test_room_is_at_most_what_a_rank_can_get() -> None:
    """Eight tokens with two experts each, two experts a rank, four ranks: 64 pairs are all that one can get."""
    room = Room(1.25)
    assert room.sizes(8, 2, 4, 2) == (5, 20)
    room.see(torch.tensor(1.2))
    room.see(torch.tensor(0.7))
    assert room.used is not None and float(room.used) == pytest.approx(1.2)
    assert "1.50 times" in room.enlarge(1.2, 1.25) and room.factor == pytest.approx(1.65)
    room.factor = 100.0
    assert room.sizes(8, 2, 4, 2) == (8, 64) and room.factor == 4.0
    assert "1.50 times" in room.enlarge(1.2, 1.25) and room.factor == 4.0  # it has been enlarged since


@pytest.mark.parametrize(
    ("chosen", "factor", "used"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], 1.25, 8 / 5),  # eight rows, and room for five
        ([0, 0, 0, 0, 1, 1, 1, 1], 1.0, 1.0),
        (
            [0, 0, 0, 0, 0, 0, 0, 0],
            2.0,
            0.5,
        ),  # all tokens have room, so their share says nothing; 8 of 16 pairs
    ],
)
def test_the_larger_share_of_both_rooms_counts(
    chosen: list[int], factor: float, used: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks with one expert each, for rank 0, which gets its own rows back in place of the other one's."""
    monkeypatch.setattr(dispatch, "all_to_all", lambda rows, ranks: rows)
    group: Any = None
    room = Room(factor)
    tokens = Dispatch(TPGroup(group, 0, 2), 1, None, room)
    tokens.before(nn.Module(), (torch.ones(8, 3), torch.tensor(chosen).unsqueeze(1), torch.ones(8, 1)))
    assert room.used is not None and float(room.used) == pytest.approx(used)
